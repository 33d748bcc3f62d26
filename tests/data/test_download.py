"""One file from the network."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from lightning_accept.data.download import check_digest, download

CONTENT = bytes(range(256)) * 3000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def test_the_file_arrives_and_nothing_is_said_without_a_terminal(served, tmp_path: Path, capfd) -> None:
    url, folder = served
    (folder / "data.zip").write_bytes(CONTENT)
    download(f"{url}/data.zip", tmp_path / "new" / "data.zip", SHA256.upper())
    assert (tmp_path / "new" / "data.zip").read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["data.zip"]
    assert capfd.readouterr() == ("", "")


def test_another_content_is_refused_and_not_kept(served, tmp_path: Path) -> None:
    url, folder = served
    (folder / "data.zip").write_bytes(CONTENT + b"x")
    with pytest.raises(ValueError, match=rf"has the SHA-256 [0-9a-f]{{64}} instead of {SHA256}"):
        download(f"{url}/data.zip", tmp_path / "new" / "data.zip", SHA256)
    assert list((tmp_path / "new").iterdir()) == []


def test_what_is_not_there(served, tmp_path: Path) -> None:
    url, _ = served
    with pytest.raises(OSError, match="404 Client Error"):
        download(f"{url}/data.zip", tmp_path / "new" / "data.zip", SHA256)
    assert list((tmp_path / "new").iterdir()) == []


def test_nobody_there(tmp_path: Path, unused_tcp_port_url: str) -> None:
    with pytest.raises(OSError, match=r"^no connection to 127\.0\.0\.1:\d+$"):
        download(f"{unused_tcp_port_url}/data.zip", tmp_path / "data.zip", SHA256)


def test_any_of_several_digests(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    check_digest(path, "0" * 64, SHA256)
    with pytest.raises(ValueError, match=f"instead of {'0' * 64} or {'1' * 64}"):
        check_digest(path, "0" * 64, "1" * 64)


@pytest.fixture
def unused_tcp_port_url() -> str:
    """A URL at which nobody listens."""
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{server.getsockname()[1]}"
