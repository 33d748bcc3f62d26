"""How far the training loop is certain to go."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_accept.horizon import TrainingHorizon
from lightning_accept.pipeline.lookahead import Feed


def make_trainer(**values: Any) -> Any:
    """A Trainer in the middle of an epoch of 20 batches, at batch 4."""
    loop = {"batch_idx": 4, "total_batch_idx": 24, "min_steps": None, **values.pop("loop", {})}
    checks = values.pop("checks", True)
    epoch_loop = SimpleNamespace(**loop, _should_check_val_epoch=lambda: checks)
    defaults = {
        "global_step": 24,
        "num_training_batches": 20,
        "val_check_batch": None,
        "check_val_every_n_epoch": 1,
        "max_steps": -1,
        "should_stop": False,
        "current_epoch": 1,
        "accumulate_grad_batches": 1,
    }
    fit_loop = SimpleNamespace(epoch_loop=epoch_loop, min_epochs=values.pop("min_epochs", None))
    return SimpleNamespace(**{**defaults, **values}, fit_loop=fit_loop)


def make_feed(count: int = 100) -> Feed:
    feed = Feed(range(count))
    feed.take(next(feed))
    return feed


@pytest.mark.parametrize(
    ("values", "ahead"),
    [
        ({}, 15),
        ({"num_training_batches": math.inf}, math.inf),
        ({"loop": {"batch_idx": 19}}, 0),
        ({"val_check_batch": 3}, 1),
        ({"val_check_batch": 5}, 0),
        ({"val_check_batch": math.inf}, 15),
        ({"val_check_batch": 3, "checks": False}, 15),
        ({"val_check_batch": 7, "check_val_every_n_epoch": None}, 3),
        ({"max_steps": 30}, 5),
        ({"max_steps": 25}, 0),
        ({"max_steps": 1000}, 15),
        ({"max_steps": 14, "global_step": 12, "accumulate_grad_batches": 2}, 3),
        ({"max_steps": 13, "global_step": 12, "accumulate_grad_batches": 4}, 3),
        ({"should_stop": True}, 0),
        ({"should_stop": True, "min_epochs": 3}, 15),
        ({"should_stop": True, "min_epochs": 1}, 0),
        ({"should_stop": True, "loop": {"min_steps": 27}}, 2),
        ({"should_stop": True, "accumulate_grad_batches": 4}, 3),
    ],
)
def test_batches_ahead(values: dict[str, Any], ahead: float) -> None:
    assert TrainingHorizon(make_trainer(**values), 0).batches_ahead(make_feed()) == ahead


def test_nothing_ahead_during_the_warmup_or_without_a_feed() -> None:
    trainer = make_trainer()
    assert TrainingHorizon(trainer, 25).batches_ahead(make_feed()) == 0
    assert TrainingHorizon(trainer, 24).batches_ahead(make_feed()) == 15
    assert TrainingHorizon(trainer, 0).batches_ahead(None) == 0


def test_which_batches_end_with_an_update() -> None:
    horizon = TrainingHorizon(make_trainer(accumulate_grad_batches=3), 0)
    assert [offset for offset in range(16) if horizon.updates(make_feed(), offset)] == [1, 4, 7, 10, 13, 15]


def test_the_last_batch_of_a_loader_without_length_ends_with_an_update() -> None:
    horizon = TrainingHorizon(make_trainer(accumulate_grad_batches=3, num_training_batches=math.inf), 0)
    feed = make_feed(4)  # one in hand, three after it
    assert [horizon.updates(feed, offset) for offset in range(4)] == [False, True, False, True]


def test_lightning_is_held_until_what_is_begun_is_trained() -> None:
    trainer = make_trainer(loop={"min_steps": 7})
    loop, feed = trainer.fit_loop.epoch_loop, make_feed()
    horizon = TrainingHorizon(trainer, 0)
    horizon.hold(feed, 3)
    assert loop.min_steps == 24 + 4
    horizon.hold(feed, 0)
    assert loop.min_steps == 7
    horizon.hold(feed, 2)
    horizon.release()
    assert loop.min_steps == 7
    accumulating = TrainingHorizon(make_trainer(accumulate_grad_batches=3), 0)
    accumulating.hold(feed, 3)
    # Batches 4 to 7: one update, and another one that batch 7 is part of.
    assert accumulating._trainer.fit_loop.epoch_loop.min_steps == 24 + 2
