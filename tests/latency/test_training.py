"""Pre-training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_accept.latency.capacity import Capacity
from lightning_accept.latency.dataset import Configuration, Dataset
from lightning_accept.latency.predictor import Predictor
from lightning_accept.latency.submodels import Measurement
from lightning_accept.latency.training import pretrain

Make = Callable[..., Dataset]


def test_same_seed_same_predictor_and_no_one_else_disturbed(make_dataset: Make) -> None:
    dataset = make_dataset()
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    one, same = (pretrain(dataset, steps=20, seed=3) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert (numpy_before == np.random.get_state()[1]).all()
    assert (one.reference == same.reference).all()
    assert one.network_output == same.network_output
    if one.network is not None and same.network is not None:
        assert torch.equal(one.network.last.weight, same.network.last.weight)


def test_better_than_capacity_on_a_device_left_out(make_dataset: Make) -> None:
    dataset = make_dataset(12)
    layers, flops = len(dataset.model.layers), dataset.model.flops
    errors: dict[str, list[float]] = {"predictor": [], "capacity": []}
    for configuration in dataset.configurations[:3]:
        rest, known = dataset.without(configuration.name), configuration.by_span()
        capacity = Capacity()
        capacity.prepare(layers, flops)
        central = rest.configurations[0].by_span()
        capacity.learn("central", [central[span] for span in capacity.spans("central", True)])
        predictor = Predictor(pretrain(rest, steps=60))
        for name, model in (("capacity", capacity), ("predictor", predictor)):
            model.learn("new", [known[span] for span in model.spans("new", False)])
            times = model.times("new")
            for one in configuration.measured:
                guess = times.forward(*one.span) + times.backward(*one.span)
                errors[name].append(abs(guess / one.seconds - 1))
    assert np.median(errors["predictor"]) < 0.06
    assert 3 * np.median(errors["predictor"]) < np.median(errors["capacity"])


@pytest.mark.parametrize("devices", [1, 2, 5])
def test_few_devices_do_without_a_network(make_dataset: Make, devices: int) -> None:
    dataset = make_dataset(devices)
    trained = pretrain(dataset)
    assert trained.network is None
    assert trained.configurations == tuple(one.name for one in dataset.configurations)
    model = Predictor(trained)
    known = dataset.configurations[0].by_span()
    model.learn("pi", [known[span] for span in model.spans("pi", False)])
    assert 0.0 < model.uncertainty("pi") < 1.0


def test_the_network_learns_what_sums_cannot_express(make_dataset: Make) -> None:
    dataset = make_dataset(24)
    # What the first half runs faster if the second half is long, on devices that are slow in their first layer.
    configurations = []
    for index, configuration in enumerate(dataset.configurations):
        strength = (index % 5) / 5
        measured = tuple(
            replace(
                one,
                forward=one.forward * (1 + strength * (one.stop - one.first == 3)) * (1 + strength * (one.stop == 1)),
                backward=one.backward * (1 + strength * (one.stop - one.first == 3)) * (1 + strength * (one.stop == 1)),
            )
            for one in configuration.measured
        )
        configurations.append(replace(configuration, measured=measured))
    trained = pretrain(replace(dataset, configurations=tuple(configurations)))
    assert trained.network is not None
    assert max(trained.network_output) > 0.2


def test_sub_models_that_some_devices_cannot_run(make_dataset: Make) -> None:
    dataset = make_dataset(9)
    weak = dataset.configurations[0]
    measured = tuple(
        replace(one, forward=math.inf, backward=math.inf) if one.stop - one.first > 5 else one for one in weak.measured
    )
    dataset = Dataset(dataset.model, (replace(weak, measured=measured), *dataset.configurations[1:]))
    trained = pretrain(dataset, steps=20)
    full = pretrain(dataset.without(weak.name), steps=0)
    assert np.isfinite(trained.reference).all()
    shifted = trained.reference - full.reference
    assert shifted.std() < 0.1


def test_refusals(make_dataset: Make) -> None:
    dataset = make_dataset(2)
    with pytest.raises(ValueError, match="at least one device configuration"):
        pretrain(Dataset(dataset.model, ()))
    gaps = tuple(replace(one, measured=one.measured[1:]) for one in dataset.configurations)
    with pytest.raises(ValueError, match=r"no configuration has a time for the layers \(0, 1\)"):
        pretrain(Dataset(dataset.model, gaps))
    useless = Configuration("useless", (Measurement(0, 1, math.inf, math.inf),))
    with pytest.raises(ValueError, match="'useless' has no time"):
        pretrain(Dataset(dataset.model, (*dataset.configurations, useless)))
