"""Removes what killed testbeds have left behind: ``python -m edge``, in the folder of the benchmarks."""

from __future__ import annotations

from .leftovers import remove_leftovers

if __name__ == "__main__":
    print("removed:", " ".join(remove_leftovers()) or "nothing, nothing was left")
