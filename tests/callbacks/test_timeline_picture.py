"""The picture: a bar per event, in the event's row."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_accept.callbacks.timeline_picture import COLOURS, draw, pixels
from lightning_accept.pipeline.events import Event
from lightning_accept.pipeline.timeline import Timeline


def filled() -> Timeline:
    timeline = Timeline(4)
    timeline.add(
        [
            Event("forward", 1.0, 2.0, 0, 0, stage=0),
            Event("send", 2.0, 4.0, 0, 0, 0, "forward", 1, 100, 0),
            Event("forward", 4.0, 5.0, 0, 0, stage=1),
            Event("backward", 5.0, 7.0, 0, 0, stage=1),
        ]
    )
    return timeline


def test_rows_and_bars() -> None:
    axes = draw(filled(), ["central node", "pi"], "title").axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["central node", "pi", "0 → 1"]
    bars = sorted((round(bar.get_y() + bar.get_height() / 2), bar.get_x(), bar.get_width()) for bar in axes.patches)
    assert bars == [(0, 0.0, 1.0), (1, 3.0, 1.0), (1, 4.0, 2.0), (2, 1.0, 2.0)]


def test_pixels() -> None:
    image = pixels(draw(filled()))
    assert image.dtype == np.uint8 and image.shape[1:] == (1200, 3)
    colours = {
        tuple(int(COLOURS[kind][place : place + 2], 16) for place in (1, 3, 5)) for kind in ("forward", "backward")
    }
    assert colours <= {tuple(int(value) for value in pixel) for pixel in np.unique(image.reshape(-1, 3), axis=0)}


def test_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        draw(Timeline(4))
