"""Which module of a LightningModule is pipelined."""

from __future__ import annotations

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import nn


def choose_module(lightning_module: LightningModule, path: str | None) -> tuple[nn.Module, str]:
    """The module to pipeline, and its name for messages.

    Args:
        lightning_module: The user's module.
        path: Dotted path, or None: the LightningModule itself if it defines forward, else its only child with
            parameters.

    Raises:
        MisconfigurationException: If there is no such module, or the choice is ambiguous; lists the choices.
    """
    if path is not None:
        try:
            return lightning_module.get_submodule(path), path
        except AttributeError as error:
            choices = _choices(lightning_module)
            raise MisconfigurationException(
                f"AccEPTStrategy(module={path!r}): {type(lightning_module).__name__} has no such module; its children"
                f" with parameters are {choices}"
            ) from error
    if type(lightning_module).forward is not LightningModule.forward:
        return lightning_module, type(lightning_module).__name__
    children = [name for name, child in lightning_module.named_children() if any(True for _ in child.parameters())]
    if len(children) == 1:
        return lightning_module.get_submodule(children[0]), children[0]
    raise MisconfigurationException(
        f"{type(lightning_module).__name__} defines no forward and has {len(children)} children with parameters; say"
        f" which one to pipeline with AccEPTStrategy(module=...): {_choices(lightning_module)}"
    )


def _choices(lightning_module: LightningModule) -> str:
    names = [name for name, child in lightning_module.named_children() if any(True for _ in child.parameters())]
    return ", ".join(repr(name) for name in names) or "none"
