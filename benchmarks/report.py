"""What every benchmark prints and writes: rows, figures, the machine and the versions."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


class Report:
    """Collects rows and figures of one benchmark.

    Args:
        name: The benchmark's name.
        quick: Whether it ran in its short form, whose figures mean nothing.
    """

    def __init__(self, name: str, quick: bool = False) -> None:
        self.name = name
        self.quick = quick
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.figures: dict[str, Any] = {}

    def row(self, table: str, **values: Any) -> None:
        """Add a row to a table and print it."""
        self.rows.setdefault(table, []).append(values)
        print(f"{table}: " + "  ".join(f"{key}={_short(value)}" for key, value in values.items()), flush=True)

    def figure(self, name: str, value: Any) -> None:
        """Set one of the figures that sum the benchmark up, and print it."""
        self.figures[name] = value
        print(f"{name} = {_short(value)}", flush=True)

    def resume(self, path: str | None) -> None:
        """Go on from the rows that an interrupted run of the same form has written to ``path``, if it exists."""
        if path is None or not Path(path).exists():
            return
        before = json.loads(Path(path).read_text())
        if before["quick"] == self.quick:
            self.rows = before["rows"]

    def finish(self, path: str | None) -> None:
        """Write all to ``path`` as JSON, if one is given."""
        if path is None:
            return
        document = {
            "benchmark": self.name,
            "quick": self.quick,
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "machine": machine(),
            "versions": versions(),
            "figures": self.figures,
            "rows": self.rows,
        }
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(document, indent=1) + "\n")


def asked_for(name: str, starts: Sequence[str] | None) -> bool:
    """Whether an option such as ``--methods`` names this one, by how it begins; without the option, all of them."""
    return not starts or any(name.startswith(start) for start in starts)


def machine() -> dict[str, Any]:
    """The processor, its number of cores, and the operating system."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    system, python = platform.system(), platform.python_version()
    return {"processor": model, "cores": os.cpu_count(), "system": system, "python": python}


def versions() -> dict[str, str]:
    """Versions of the packages that matter."""
    found = {}
    for package in ("lightning-accept", "torch", "lightning", "numpy", "numba", "aiohttp", "requests", "safetensors"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
