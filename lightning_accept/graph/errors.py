"""What can go wrong between a module and a stage program."""

from __future__ import annotations


class TraceError(RuntimeError):
    """A module cannot be exported; the message gives the reason, the user's own line and what to change."""


class ProgramError(ValueError):
    """A stage program is not one that this package could have written, or its tensors do not fit it."""
