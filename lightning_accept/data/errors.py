"""What is raised where data is missing."""

from __future__ import annotations


class DataNotFoundError(RuntimeError):
    """A data set is neither there nor to be had over the network; the message says what to do."""
