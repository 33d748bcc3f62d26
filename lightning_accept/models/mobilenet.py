"""MobileNetV2 for small images."""

from __future__ import annotations

from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import nn
from torchvision.models import mobilenet_v2

from lightning_accept.models.classifier import Classifier


class MobileNetV2Classifier(Classifier):
    """MobileNetV2 (arXiv 1801.04381), the paper's model for MNIST and CIFAR-10.

    Images are float ``[batch, channels, height, width]``.

    Args:
        classes: Number of classes.
        channels: Channels of the images: 1 for grey, 3 for colour.
        width: Width multiplier.
        first_stride: Stride of the first layer. 2 is the original; 1 keeps more of small images, for nearly four times
            the work.
        last_stride: Stride of ``features.14``, the last layer that shrinks. 2 is the original; 1 keeps images of 32
            pixels from ending as a single pixel if ``first_stride`` is 2.
        dropout: Share of features dropped before the last layer.
        optimizer: See :class:`Classifier`.
        lr_scheduler: See :class:`Classifier`.
        interval: See :class:`Classifier`.

    Raises:
        ValueError: If a stride is neither 1 nor 2, or ``interval`` neither ``epoch`` nor ``step``.
    """

    def __init__(
        self,
        classes: int = 10,
        channels: int = 3,
        width: float = 1.0,
        first_stride: int = 1,
        last_stride: int = 2,
        dropout: float = 0.2,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        interval: str = "epoch",
    ) -> None:
        net = small_mobilenet_v2(classes, channels, width, first_stride, last_stride, dropout)
        super().__init__(net, classes, optimizer, lr_scheduler, interval)
        self.save_hyperparameters(ignore=["optimizer", "lr_scheduler"])


def small_mobilenet_v2(
    classes: int = 10,
    channels: int = 3,
    width: float = 1.0,
    first_stride: int = 1,
    last_stride: int = 2,
    dropout: float = 0.2,
) -> nn.Module:
    """Torchvision's MobileNetV2 with these strides; see :class:`MobileNetV2Classifier`.

    Raises:
        ValueError: If a stride is neither 1 nor 2.
    """
    for name, stride in (("first_stride", first_stride), ("last_stride", last_stride)):
        if stride not in (1, 2):
            raise ValueError(f"{name}={stride}: give 1 or 2")
    net = mobilenet_v2(num_classes=classes, width_mult=width, dropout=dropout)
    stem = net.features[0][0]
    net.features[0][0] = nn.Conv2d(channels, stem.out_channels, 3, stride=first_stride, padding=1, bias=False)
    nn.init.kaiming_normal_(net.features[0][0].weight, mode="fan_out")
    net.features[14].conv[1][0].stride = (last_stride, last_stride)
    return net  # type: ignore[no-any-return]
