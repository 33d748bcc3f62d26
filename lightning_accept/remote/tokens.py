"""Bearer tokens: where they come from and how they are compared."""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
from pathlib import Path

TOKEN_VARIABLE = "LIGHTNING_ACCEPT_TOKEN"

_WELL_FORMED = re.compile(r"[\x21-\x7e]+")


def new_token() -> str:
    """A random token of 256 bits."""
    return secrets.token_urlsafe(32)


def read_token(path: str | os.PathLike[str]) -> str:
    """The token in the file ``path``, without surrounding white space.

    Raises:
        ValueError: If the file cannot be read or holds no token.
    """
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"cannot read the token file {str(path)!r}: {error}; a new one is made by"
            f" python -c 'import secrets; print(secrets.token_urlsafe(32))' > {path}"
        ) from error
    return check_token(token, f"the token file {str(path)!r}")


def check_token(token: str, source: str) -> str:
    """``token`` itself if it can travel in a header.

    Raises:
        ValueError: If it is empty or holds white space or other than ASCII characters.
    """
    if not _WELL_FORMED.fullmatch(token):
        raise ValueError(f"{source} must hold one word of printable ASCII characters")
    return token


def readable_by_all(path: str | os.PathLike[str]) -> bool:
    """Whether every user of this machine may read ``path`` (always False on systems without such permissions)."""
    return os.name == "posix" and bool(Path(path).stat().st_mode & stat.S_IROTH)


def bears(header: str | None, token: str) -> bool:
    """Whether an ``Authorization`` header bears ``token``; takes the same time wherever they differ."""
    given = header.removeprefix("Bearer ") if header is not None and header.startswith("Bearer ") else ""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), token.encode())
