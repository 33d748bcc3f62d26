"""Methods of the user's objects that others stand in for while a pipeline is up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn

from lightning_accept.pipeline.lookahead import Handle
from lightning_accept.pipeline.suspended import SuspendedStep


class StandIns:
    """Replaces methods of single objects, and gives them back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def put(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Let ``function`` stand in for ``owner.name``."""
        own = vars(owner).get(name)
        setattr(owner, name, function)
        if own is None:
            self.undo_with(lambda: vars(owner).pop(name, None))
        else:
            self.undo_with(lambda: setattr(owner, name, own))

    def undo_with(self, action: Callable[[], Any]) -> None:
        """Do ``action`` too when all is given back."""
        self._undo.append(action)

    def give_back(self) -> None:
        """Undo everything, the last first. Idempotent."""
        while self._undo:
            self._undo.pop()()


def watch_module(stand_ins: StandIns, module: LightningModule) -> None:
    """Make the LightningModule's own methods fit for batches that are begun before their turn."""
    before_transfer, user_log = module._on_before_batch_transfer, module.log

    def on_before_batch_transfer(batch: Any, dataloader_idx: int = 0) -> Any:
        if isinstance(batch, Handle):
            return batch  # its hooks run when it is opened, once
        # Several dataloaders at once: the batch is a collection of handles, and nothing is begun ahead.
        return before_transfer(apply_to_collection(batch, Handle, _unwrap), dataloader_idx)

    def deferring_log(*args: Any, **kwargs: Any) -> None:
        step = SuspendedStep.current()
        if step is not None and step.early:
            step.deferred.append(lambda: user_log(*args, **kwargs))  # to be logged with its own batch
        else:
            user_log(*args, **kwargs)

    stand_ins.put(module, "_on_before_batch_transfer", on_before_batch_transfer)
    stand_ins.put(module, "log", deferring_log)


def watch_zero_grad(
    stand_ins: StandIns,
    modules: Sequence[nn.Module],
    optimizers: Sequence[Sequence[Any]],
    zeroed: Callable[[int], None],
) -> None:
    """Tell of every ``zero_grad()``, so that remote gradients are dropped with the local ones.

    Args:
        stand_ins: Where to put the stand-ins.
        modules: Modules whose ``zero_grad`` means all optimizers.
        optimizers: For each optimizer the objects that users call ``zero_grad`` on.
        zeroed: Called with the optimizer's index.
    """

    def watch(owner: Any, indices: Sequence[int]) -> None:
        original = owner.zero_grad

        def zero_grad(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            for index in indices:
                zeroed(index)

        stand_ins.put(owner, "zero_grad", zero_grad)

    for module in dict.fromkeys(modules):
        watch(module, range(len(optimizers)))
    for index, faces in enumerate(optimizers):
        for face in faces:
            watch(face, [index])


def _unwrap(handle: Handle) -> Any:
    if handle.feed is not None:
        handle.feed.take(handle)
    return handle.raw
