"""Checks that torch.nn.functional makes in Python before it calls the operation, and that an exported graph lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Size, Tensor

ArgumentCheck = Callable[[Sequence[Any], Mapping[str, Any]], None]


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], position: int, name: str) -> Any:
    return args[position] if position < len(args) else kwargs.get(name)


def _values_per_channel(size: Sequence[int]) -> int:
    count = size[0]
    for length in size[2:]:
        count *= length
    return count


def check_batch_norm(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """The check of ``F.batch_norm``, with its message."""
    size: Size = args[0].size()
    if _argument(args, kwargs, 5, "training") and _values_per_channel(size) == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {size}")


def check_instance_norm(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """The check of ``F.instance_norm``, with its message."""
    size: Size = args[0].size()
    if not _argument(args, kwargs, 5, "use_input_stats"):
        return
    count = 1
    for length in size[2:]:
        count *= length
    if count == 1:
        raise ValueError(f"Expected more than 1 spatial element when training, got input size {size}")


def check_group_norm(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """The check of ``F.group_norm``, with its message."""
    tensor: Tensor = args[0]
    groups = _argument(args, kwargs, 1, "num_groups")
    size = [tensor.size(0) * tensor.size(1) // groups, groups, *tensor.size()[2:]]
    if _values_per_channel(size) == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {size}")


ARGUMENT_CHECKS: Mapping[str, ArgumentCheck] = {
    "aten.batch_norm.default": check_batch_norm,
    "aten.instance_norm.default": check_instance_norm,
    "aten.group_norm.default": check_group_norm,
}
"""By operation."""
