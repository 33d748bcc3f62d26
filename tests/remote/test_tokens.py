"""Bearer tokens."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_accept.remote.tokens import bears, new_token, read_token, readable_by_all


@pytest.mark.parametrize(
    ("header", "fits"),
    [
        ("Bearer abc", True),
        ("Bearer abcd", False),
        ("Bearer ab", False),
        ("bearer abc", False),
        ("Bearer  abc", False),
        ("Basic abc", False),
        ("abc", False),
        ("Bearer ", False),
        ("", False),
        (None, False),
        ("Bearer \udcff", False),
    ],
)
def test_only_the_exact_token_fits(header: str | None, fits: bool) -> None:
    assert bears(header, "abc") is fits


def test_new_tokens_are_long_and_differ() -> None:
    assert len(new_token()) >= 40
    assert new_token() != new_token()


def test_a_token_file_is_read_without_white_space(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("  abc\n")
    assert read_token(path) == "abc"


@pytest.mark.parametrize("content", ["", "\n", "two words", "tökén"])
def test_a_token_file_without_a_token(tmp_path: Path, content: str) -> None:
    path = tmp_path / "token"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match="must hold one word of printable ASCII"):
        read_token(path)


def test_a_missing_token_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read the token file .*secrets.token_urlsafe"):
        read_token(tmp_path / "token")


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX systems")
def test_permissions_of_a_token_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("abc")
    path.chmod(0o644)
    assert readable_by_all(path)
    path.chmod(0o600)
    assert not readable_by_all(path)
