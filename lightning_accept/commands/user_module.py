"""The module that a user names on the command line, and its input."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accept.graph.encoding import DTYPES


class UserModuleError(ValueError):
    """The module or its input cannot be made from what the command line says."""


def build_module(path: str, arguments: str | None = None) -> nn.Module:
    """Call the class or function at a dotted path, found as Python finds it from the current folder.

    Args:
        path: ``package.module.Name`` or ``package.module:Name``.
        arguments: JSON: a list of positional or an object of keyword arguments; None for none.

    Raises:
        UserModuleError: If there is no such name, the arguments are not JSON, or no module comes of it.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module_name, _, name = path.replace(":", ".").rpartition(".")
    try:
        made = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserModuleError(f"cannot find {path!r}: {error}; write it like package.module.Name") from error
    if not isinstance(made, nn.Module):
        args, kwargs = _arguments(arguments)
        try:
            made = made(*args, **kwargs)
        except TypeError as error:
            raise UserModuleError(f"{path} does not take these arguments: {error}; give them with --args") from error
    if not isinstance(made, nn.Module):
        raise UserModuleError(f"{path} gives a {type(made).__name__}, not a module")
    return made


def _arguments(text: str | None) -> tuple[list[Any], dict[str, Any]]:
    try:
        value = [] if text is None else json.loads(text)
    except ValueError as error:
        raise UserModuleError(f"--args is not JSON: {error}") from error
    if isinstance(value, list):
        return value, {}
    if isinstance(value, dict):
        return [], value
    raise UserModuleError("--args must be a JSON list or object")


def choose_part(module: nn.Module, path: str | None) -> nn.Module:
    """What of ``module`` is pipelined: the submodule at ``path``; by default what the strategy would choose.

    Raises:
        UserModuleError: If there is no such submodule, or the choice is ambiguous.
    """
    # Who has not imported Lightning has no LightningModule, and need not wait for it.
    lightning = sys.modules.get("lightning.pytorch")
    if lightning is not None and isinstance(module, lightning.LightningModule):
        from lightning.fabric.utilities.exceptions import MisconfigurationException

        from lightning_accept.choose import choose_module

        try:
            return choose_module(module, path)[0]
        except MisconfigurationException as error:
            raise UserModuleError(str(error)) from error
    try:
        return module if path is None else module.get_submodule(path)
    except AttributeError as error:
        raise UserModuleError(f"{type(module).__name__} has no submodule {path!r}: {error}") from error


def make_input(module: nn.Module, shapes: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of one call: zeros of the given shapes, or the module's ``example_input_array``.

    Args:
        module: Who may have an example.
        shapes: One per argument, like ``128,3,32,32`` or ``128,20:int64``; empty for the example.

    Raises:
        UserModuleError: If a shape is none, or there is no example.
    """
    if shapes:
        return tuple(_zeros(shape) for shape in shapes), {}
    example = getattr(module, "example_input_array", None)
    if isinstance(example, Tensor):
        return (example,), {}
    if isinstance(example, dict):
        return (), example
    if isinstance(example, tuple | list):
        return tuple(example), {}
    raise UserModuleError(
        "give the shape of the input, such as --input 128,3,32,32 (or the module example_input_array)"
    )


def _zeros(text: str) -> Tensor:
    sizes, _, dtype = text.partition(":")
    try:
        shape = [int(size) for size in sizes.split(",")]
    except ValueError:
        shape = [0]
    if any(size < 1 for size in shape):
        raise UserModuleError(f"{text!r} is no shape; write it like 128,3,32,32 or 128,20:int64")
    if dtype and dtype not in DTYPES:
        raise UserModuleError(f"there is no dtype {dtype!r}; choose among {', '.join(DTYPES)}")
    return torch.zeros(shape, dtype=DTYPES[dtype or "float32"])
