"""What goes wrong with a testbed."""

from __future__ import annotations


class EdgeError(RuntimeError):
    """The testbed cannot be built, or a command on it failed; the message says what to change."""
