"""A picture of the pipeline's timeline: one row per stage and per way of a link (as Figure 2 of AccEPT)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_accept.pipeline.events import Event
from lightning_accept.pipeline.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    "forward": "#4c86c6",
    "backward": "#e08b3e",
    "loss": "#8d6cab",
    "step": "#6f7378",
    "evaluate": "#9fb7a4",
}
_NARROW = 0.012
"""Share of the whole width from which a bar has room for its batch's number."""


def draw(timeline: Timeline, names: list[str] | None = None, title: str | None = None) -> Figure:
    """Draw a timeline.

    Args:
        timeline: What to draw.
        names: What to call the stages, in the order of their numbers.
        title: A line above the picture.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If the timeline is empty.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    stages, links = timeline.stages(), timeline.links()
    if not stages:
        raise ValueError("there is nothing to draw: no batch was trained")
    rows: list[tuple[str, list[Event], float]] = []
    for stage, events in stages.items():
        rows.append((names[stage] if names is not None and stage < len(names) else f"stage {stage}", events, 0.8))
    for (source, target, _), events in links.items():
        rows.append((f"{source} \N{RIGHTWARDS ARROW} {target}", events, 0.5))
    every = [event for _, events, _ in rows for event in events]
    begin, end = min(event.start for event in every), max(event.end for event in every)
    width = max(end - begin, 1e-6)
    figure = Figure(figsize=(12.0, 0.8 + 0.42 * len(rows)), dpi=100, layout="constrained")
    axes: Any = figure.add_subplot()
    for row, (_, events, height) in enumerate(rows):
        for event in events:
            _bar(axes, row, height, event, begin, width)
    axes.axhline(len(stages) - 0.5, color="#c8c8c8", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0.0, width)
    axes.set_xlabel("seconds")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    shown = {event.carries or event.kind for event in every}
    patches = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items() if kind in shown]
    figure.legend(handles=patches, loc="outside upper right", ncols=len(patches), frameon=False, fontsize="small")
    if title is not None:
        figure.suptitle(title, x=0.01, ha="left", fontsize="medium")
    return figure


def pixels(figure: Figure) -> Any:
    """The figure as an image: a numpy array, uint8 [height, width, 3]."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba(), dtype=np.uint8)[..., :3].copy()


def _bar(axes: Any, row: int, height: float, event: Event, begin: float, width: float) -> None:
    colour = COLOURS.get(event.carries or event.kind)
    if colour is None:
        return
    left, length = event.start - begin, event.seconds
    wide = length > _NARROW * width
    # What is too short for the scale still shows as a line.
    axes.barh(row, length, height, left=left, color=colour, edgecolor="white" if wide else colour, linewidth=0.4)
    if wide and event.kind != "step":
        axes.text(left + length / 2, row, str(event.batch), ha="center", va="center", color="white", fontsize="x-small")
