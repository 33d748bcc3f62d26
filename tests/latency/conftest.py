"""Made-up devices: profiles of low rank, own deviations, gains of layers that run together, and noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_accept.graph import Chain, trace
from lightning_accept.latency.dataset import Configuration, Dataset
from lightning_accept.latency.model_facts import ModelFacts
from lightning_accept.latency.request import ProfileRequest
from lightning_accept.latency.submodels import Measurement, all_spans


@pytest.fixture
def make_dataset() -> Callable[..., Dataset]:
    def make(devices: int = 10, layers: int = 7, seed: int = 0, noise: float = 0.02) -> Dataset:
        random = np.random.default_rng(seed)
        flops = tuple(float(one) for one in np.exp(random.normal(16, 0.7, layers)))
        usual = 1e-9 * np.array(flops)[:, None] * np.exp(random.normal(0, 0.3, (layers, 2))) * np.array([1.0, 2.0])
        factors = random.normal(0, 0.4, (2, layers, 2))
        configurations = []
        for device in range(devices):
            own = random.normal(0, 1.0) + np.tensordot(random.normal(0, 1, 2), factors, 1)
            times = usual * np.exp(own + random.normal(0, 0.03, (layers, 2)))
            together = random.uniform(0.0, 0.2)
            passes: list[list[Measurement]] = [[], []]
            for first, stop in all_spans(layers):
                seconds = times[first:stop].sum(0) * (1 - together * (1 - 1 / (stop - first)))
                for measured in passes:
                    forward, backward = seconds * np.exp(random.normal(0, noise, 2))
                    measured.append(Measurement(first, stop, float(forward), float(backward)))
            description = {"threads": 1, "gain": round(together, 3)}
            configurations.append(Configuration(f"device {device}", tuple(passes[0]), tuple(passes[1]), description))
        names = tuple(f"layer{index}" for index in range(layers))
        facts = ModelFacts("made up", names, flops, (0,) * layers, (0,) * layers, ((),) * (layers + 1), 8)
        return Dataset(facts, tuple(configurations))

    return make


class Ticking:
    """A clock that goes on by one tick whenever it is read."""

    def __init__(self, tick: float = 1.0) -> None:
        self.tick = tick
        self.now = 0.0

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


@pytest.fixture
def ticking() -> type[Ticking]:
    return Ticking


@pytest.fixture(scope="session")
def make_request() -> Callable[..., ProfileRequest]:
    """The request for all layers, one by one and together, of a module called with these tensors."""

    def make(module: nn.Module, *inputs: Tensor, **settings: Any) -> ProfileRequest:
        traced = trace(module, inputs, {})
        chain = Chain.from_trace(traced)
        count = len(chain.layers)
        spans = settings.pop("spans", [*((index, index + 1) for index in range(count)), (0, count)])
        return ProfileRequest.of(chain, traced, spans, **settings)

    return make


@pytest.fixture(scope="session")
def convolutions() -> nn.Module:
    """Four layers: two convolutions with BatchNorm, dropout, and a linear one."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(8 * 36, 16), nn.ReLU()),
        nn.Linear(16, 4),
    )


@pytest.fixture(scope="session")
def images() -> Tensor:
    return torch.randn(4, 3, 6, 6)
