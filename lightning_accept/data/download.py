"""One file from the network: with a digest, with progress, and never half a file."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from urllib.parse import urlsplit

import requests
from tqdm import tqdm

_CHUNK = 1 << 18


def download(url: str, path: Path, sha256: str) -> None:
    """Download ``url`` to ``path``; the progress is shown on one line if there is a terminal.

    The file appears under its name only when it is complete and has the digest ``sha256``.

    Raises:
        OSError: If it cannot be downloaded (``requests`` derives its errors from it) or written.
        ValueError: If it has another digest.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with requests.get(url, stream=True, timeout=(10, 60)) as reply, part.open("wb") as file:
            reply.raise_for_status()
            length = int(reply.headers.get("Content-Length", 0)) or None
            with tqdm(total=length, unit="B", unit_scale=True, desc=path.name, disable=None, leave=False) as bar:
                for chunk in reply.iter_content(_CHUNK):
                    file.write(chunk)
                    bar.update(len(chunk))
        check_digest(part, sha256)
        part.replace(path)
    except requests.ConnectionError as error:
        raise OSError(f"no connection to {urlsplit(url).netloc}") from error
    finally:
        part.unlink(missing_ok=True)


def check_digest(path: Path, *sha256: str) -> None:
    """Make sure that a file has one of the digests ``sha256``.

    Raises:
        ValueError: If it has another.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() not in {known.lower() for known in sha256}:
        raise ValueError(f"{path} has the SHA-256 {digest.hexdigest()} instead of {' or '.join(sha256)}")
