"""Trainer features that the pipeline does not serve: refused before training, with what to do instead."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer, callbacks
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.optim import Optimizer

_AVERAGING: tuple[type[Callback], ...] = tuple(
    getattr(callbacks, name)
    for name in ("StochasticWeightAveraging", "WeightAveraging")  # the second one is new in Lightning 2.6
    if hasattr(callbacks, name)
)


def check_trainer(trainer: Trainer, in_flight: int | None) -> None:
    """Refuse what the Trainer was asked for and the pipeline cannot do.

    Args:
        trainer: The trainer, in fit.
        in_flight: Batches in flight; None for ``auto``.

    Raises:
        MisconfigurationException: Naming the argument and the way out.
    """
    # Trainer.num_devices is 1 for every strategy of a single device.
    devices = len(getattr(trainer.strategy, "parallel_devices", None) or [trainer.strategy.root_device])
    if devices > 1 or trainer.num_nodes > 1:
        raise MisconfigurationException(
            f"AccEPTStrategy uses one device on the central node, not {devices} on {trainer.num_nodes} nodes; set"
            " Trainer(devices=1, num_nodes=1) and list the others as workers"
        )
    precision = trainer.precision_plugin
    if isinstance(precision, MixedPrecision) and precision.scaler is not None:
        raise MisconfigurationException(
            "Trainer(precision='16-mixed') scales the loss, which stages on other devices cannot undo; use 'bf16-mixed'"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, _AVERAGING):
            raise MisconfigurationException(
                f"{type(callback).__name__} averages the weights on the central node, where those of later stages are"
                " not up to date while training; remove it"
            )
        if isinstance(callback, callbacks.ModelPruning):
            raise MisconfigurationException(
                "ModelPruning changes the weights on the central node, where those of later stages are not in use while"
                " training; remove it, and prune between two fits with torch.nn.utils.prune"
            )
    module = trainer.lightning_module
    if in_flight not in (None, 1):
        if not module.automatic_optimization:
            raise MisconfigurationException(
                f"manual optimization needs AccEPTStrategy(in_flight=1), not in_flight={in_flight}"
            )
        if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
            raise MisconfigurationException(
                f"training_step(dataloader_iter) needs AccEPTStrategy(in_flight=1), not in_flight={in_flight}"
            )


def check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that cannot be split over stages.

    Raises:
        MisconfigurationException: Naming the optimizer.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise MisconfigurationException(
                "LBFGS evaluates the loss several times per step, which a pipeline cannot do; choose SGD, AdamW or"
                " another first-order optimizer"
            )
