"""MobileNetV2 for small images."""

from __future__ import annotations

import pytest
import torch
from torchvision.models import mobilenet_v2

from lightning_accept.models import MobileNetV2Classifier, small_mobilenet_v2


@pytest.mark.parametrize(
    ("first", "last", "size", "left"), [(2, 2, 32, 1), (2, 1, 32, 2), (1, 2, 32, 2), (1, 1, 28, 4), (2, 2, 28, 1)]
)
def test_strides(first: int, last: int, size: int, left: int) -> None:
    net = small_mobilenet_v2(channels=1, width=0.25, first_stride=first, last_stride=last).eval()
    images = torch.zeros(2, 1, size, size)
    assert net.features(images).shape[2:] == (left, left)
    assert net(images).shape == (2, 10)


def test_the_original_is_among_them() -> None:
    ours, original = small_mobilenet_v2(first_stride=2), mobilenet_v2(num_classes=10)
    original.load_state_dict(ours.state_dict())
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours.eval()(images), original.eval()(images))


@pytest.mark.parametrize("name", ["first_stride", "last_stride"])
def test_strides_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=3: give 1 or 2"):
        MobileNetV2Classifier(**{name: 3})


def test_hyper_parameters_are_plain_and_complete() -> None:
    model = MobileNetV2Classifier(classes=4, channels=1, width=0.25, dropout=0.0)
    assert dict(model.hparams) == {
        "classes": 4,
        "channels": 1,
        "width": 0.25,
        "first_stride": 1,
        "last_stride": 2,
        "dropout": 0.0,
        "interval": "epoch",
    }
    assert len(model.net.features) == 19
