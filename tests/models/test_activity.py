"""The five-layer CNN for activity recognition."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_accept.models import ActivityClassifier, activity_cnn


def test_five_layers() -> None:
    net = activity_cnn()
    assert [name for name, _ in net.named_children()] == ["conv1", "conv2", "conv3", "dense1", "dense2"]
    weights = [module for module in net.modules() if isinstance(module, nn.Conv1d | nn.Linear)]
    assert len(weights) == 5
    assert net(torch.zeros(2, 9, 128)).shape == (2, 6)


def test_other_sensors() -> None:
    model = ActivityClassifier(classes=4, channels=6, length=64)
    assert model.net(torch.zeros(2, 6, 64)).shape == (2, 4)
    assert dict(model.hparams) == {"classes": 4, "channels": 6, "length": 64, "interval": "epoch"}


@pytest.mark.parametrize("length", [0, 100])
def test_length_is_checked(length: int) -> None:
    with pytest.raises(ValueError, match=f"length={length}: give a multiple of 8"):
        activity_cnn(length=length)
