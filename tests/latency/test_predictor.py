"""The predictor as a latency model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_accept.latency.dataset import Dataset
from lightning_accept.latency.network import DualStream
from lightning_accept.latency.predictor import Predictor
from lightning_accept.latency.pretrained import Pretrained
from lightning_accept.latency.submodels import Measurement, Span
from lightning_accept.latency.training import pretrain

Make = Callable[..., Dataset]


@pytest.fixture
def dataset(make_dataset: Make) -> Dataset:
    return make_dataset(11)


@pytest.fixture
def trained(dataset: Dataset) -> Pretrained:
    """With a network that says something."""
    own = pretrain(dataset.without("device 10"), steps=0)
    network = DualStream(len(own.layers), 2 * len(own.spans))
    torch.nn.init.normal_(network.last.weight, 0.0, 0.01)
    return replace(own, network=network.requires_grad_(False), network_output=(1.0, 1.0))


def measured(dataset: Dataset, model: Predictor, factor: float = 1.0) -> list[Measurement]:
    known = dataset.configurations[-1].by_span()
    spans: list[Span] = model.spans("pi", False)
    return [Measurement(*span, known[span].forward * factor, known[span].backward * factor) for span in spans]


def test_doubling_h_doubles_every_prediction(dataset: Dataset, trained: Pretrained) -> None:
    model = Predictor(trained)
    model.learn("pi", measured(dataset, model))
    model.learn("slow", measured(dataset, model, 2.0))
    one, two = model.times("pi").table(), model.times("slow").table()
    upper = np.triu_indices(len(one), 1)
    assert two[upper] == pytest.approx(2 * one[upper])
    assert model.uncertainty("slow") == pytest.approx(model.uncertainty("pi"))


def test_a_check_is_believed_at_once(dataset: Dataset, trained: Pretrained) -> None:
    model = Predictor(trained)
    model.learn("pi", measured(dataset, model))
    layers = len(trained.layers)
    before = model.times("pi").table()[1, layers]
    known = Measurement(1, layers, before, before)  # twice as long
    model.observe("pi", known)
    assert model.times("pi").table()[1, layers] == pytest.approx(before)
    model.check("pi", known)
    assert model.times("pi").table()[1, layers] == pytest.approx(2 * before, rel=0.1)


def test_what_a_check_finds_impossible_is_not_planned(dataset: Dataset, trained: Pretrained) -> None:
    model = Predictor(trained)
    model.learn("pi", measured(dataset, model))
    model.check("pi", Measurement(1, 3, math.inf, math.inf))
    times = model.times("pi")
    assert [math.isinf(times.forward(*span)) for span in ((1, 3), (0, 3), (1, 2))] == [True, True, False]
    with pytest.raises(ValueError, match="no layers"):
        model.check("pi", Measurement(1, 99, math.inf, math.inf))


def test_observations_help_on_average_and_their_device_alone(make_dataset: Make) -> None:
    dataset = make_dataset(10, layers=12, seed=4)
    errors: dict[str, list[float]] = {"before": [], "after": []}
    for configuration in dataset.configurations[:3]:
        model = Predictor(pretrain(dataset.without(configuration.name), steps=0))
        known = configuration.by_span()
        for device in ("pi", "other"):
            model.learn(device, [known[span] for span in model.spans(device, False)])
        other = model.times("other").table()
        for when in ("before", "after"):
            times = model.times("pi")
            for one in configuration.measured[1::2]:
                guess = times.forward(*one.span) + times.backward(*one.span)
                errors[when].append(abs(guess / one.seconds - 1))
            for sample in configuration.repeats[::4]:
                model.observe("pi", sample)
        assert (model.times("other").table() == other).all()
    assert np.mean(errors["after"]) < np.mean(errors["before"])


def test_impossible_stays_so(dataset: Dataset, trained: Pretrained) -> None:
    model = Predictor(trained)
    found = measured(dataset, model)
    big = max(found, key=lambda one: one.stop - one.first)
    found = [Measurement(*one.span, math.inf, math.inf) if one is big else one for one in found]
    model.learn("pi", found)
    times = model.times("pi")
    assert math.isinf(times.forward(*big.span))
    assert math.isfinite(times.forward(big.first, big.first + 1))
    for _ in range(3):
        model.observe("pi", found[0])
    assert math.isinf(model.times("pi").backward(*big.span))
    with pytest.raises(ValueError, match="cannot run any"):
        model.learn("pi", [Measurement(*one.span, math.inf, math.inf) for one in found])


def test_a_device_out_of_range_is_told_to_be(dataset: Dataset, trained: Pretrained) -> None:
    model = Predictor(trained)
    found = measured(dataset, model)
    model.learn("pi", found)
    assert not model.unusual("pi")
    layers = np.random.default_rng(0).lognormal(0, 1.5, (len(trained.layers), 2))
    odd = [Measurement(*one.span, *layers[one.first : one.stop].sum(0).tolist()) for one in found]
    model.learn("odd", odd)
    assert model.unusual("odd")
    assert model.uncertainty("odd") > 2 * model.uncertainty("pi")
    times = model.times("odd")
    misses = [abs(math.log((times.forward(*one.span) + times.backward(*one.span)) / one.seconds)) for one in odd]
    assert np.median(misses) < 0.3


def test_learning_again_forgets_observations(dataset: Dataset, trained: Pretrained) -> None:
    model = Predictor(trained)
    found = measured(dataset, model)
    model.learn("pi", found)
    before = model.times("pi").table()
    for _ in range(4):
        model.observe("pi", Measurement(1, 3, 9.0, 9.0))
    assert (model.times("pi").table() != before).any()
    model.learn("pi", found)
    assert (model.times("pi").table() == before).all()


def test_useless_reports_are_ignored(dataset: Dataset, trained: Pretrained) -> None:
    model = Predictor(trained)
    model.learn("pi", measured(dataset, model))
    before = model.times("pi").table()
    for forward in (0.0, math.inf, math.nan):
        model.observe("pi", Measurement(0, 1, forward, forward))
    assert (model.times("pi").table() == before).all()
    with pytest.raises(ValueError, match="no layers"):
        model.observe("pi", Measurement(0, 99, 1.0, 1.0))


def test_prepare_checks_and_forgets(dataset: Dataset, trained: Pretrained) -> None:
    model = Predictor(trained)
    model.learn("pi", measured(dataset, model))
    model.prepare(7, dataset.model.flops, dataset.model.layers)
    with pytest.raises(ValueError, match="nothing was measured"):
        model.times("pi")
    with pytest.raises(ValueError, match="the model has 2"):
        model.prepare(2, [1.0, 2.0])


def test_loads_and_copies(dataset: Dataset, trained: Pretrained, tmp_path: Path) -> None:
    trained.save(tmp_path / "file")
    model = Predictor.load(tmp_path / "file")
    model.learn("pi", measured(dataset, model))
    copied = copy.deepcopy(model)
    assert (copied.times("pi").table() == model.times("pi").table()).all()
