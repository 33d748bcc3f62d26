"""PipelineMetrics: turns the stages' figures into metrics for a logger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_TIMES = ("forward_seconds", "backward_seconds", "step_seconds", "waiting_seconds")
_WHAT = {"down": "activation", "up": "gradient"}


class PipelineMetrics:
    """What has happened between two looks at :meth:`lightning_accept.AccEPTStrategy.stats`."""

    def __init__(self) -> None:
        self._before: dict[int, Mapping[str, Any]] = {}

    def update(self, stats: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Metrics by name; seconds and bytes are those of one job, a micro-batch of a batch.

        Args:
            stats: The figures of all stages, the central node's first. A worker that holds no stage at the moment may
                tell nothing.
        """
        metrics: dict[str, float] = {}
        for figures in stats:
            if figures:
                metrics.update(self._stage(figures))
        metrics.update(_received(stats))
        self._before = {figures["stage"]: figures for figures in stats if figures}
        return metrics

    def _stage(self, now: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
        name = f"accept/stage_{now['stage']}"
        before = self._before.get(now["stage"])
        if before is not None and before["term"] != now["term"]:
            before = None  # figures begin anew with every deployment
        jobs = now["jobs"] - (before["jobs"] if before else 0)
        if jobs > 0:
            times = {key: (now[key] - (before[key] if before else 0.0)) / jobs for key in _TIMES}
            yield from ((f"{name}/{key}", seconds) for key, seconds in times.items())
            if sum(times.values()) > 0:
                yield f"{name}/busy", 1 - times["waiting_seconds"] / sum(times.values())
        yield f"{name}/staleness", float(now["staleness"])
        yield f"{name}/layers", float(len(now["layers"]))
        for key, title in (("queued", "queued"), ("outstanding", "outstanding"), ("memory", "memory_bytes")):
            if now.get(key) is not None:
                yield f"{name}/{title}", float(now[key])
        for way, link in now["links"].items():
            yield from self._link(now, before, way, link)

    def _link(
        self, now: Mapping[str, Any], before: Mapping[str, Any] | None, way: str, link: Mapping[str, Any]
    ) -> Iterator[tuple[str, float]]:
        name = f"accept/link_{now['stage']}_{link['peer']}/{_WHAT[way]}"
        earlier = before["links"][way] if before is not None else None
        packets = link["packets"] - (earlier["packets"] if earlier else 0)
        if packets > 0:
            for key, title in (
                ("payload_bytes", "bytes"),
                ("raw_bytes", "raw_bytes"),
                ("encode_seconds", "encode_seconds"),
            ):
                yield f"{name}_{title}", (link[key] - (earlier[key] if earlier else 0)) / packets
        if link["bandwidth"] is not None:
            yield f"{name}_bits_per_second", float(link["bandwidth"])
        if link["last_error"] is not None:
            yield f"{name}_quantisation_error", float(link["last_error"])


def _received(stats: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """The speed of the ways that end at the central node, which only that one can tell."""
    sources = {"down": len(stats) - 1, "up": 1}
    for way, received in (stats[0].get("received", {}) if stats else {}).items():
        if received["bandwidth"] is not None:
            yield f"accept/link_{sources[way]}_0/{_WHAT[way]}_bits_per_second", float(received["bandwidth"])
