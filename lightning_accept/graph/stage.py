"""A loaded stage program: runs it with autograd, autocast and buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accept.graph.checks import ARGUMENT_CHECKS
from lightning_accept.graph.errors import ProgramError
from lightning_accept.graph.ops import get_op
from lightning_accept.graph.program import BufferInfo, ModeProgram, ParameterInfo, StageProgram, TensorInfo
from lightning_accept.graph.values import STAGE_DEVICE, Autocast, Node, Ref, find_refs, map_refs

_CUDNN_FLAGS = ("cudnn_enabled", "cudnn_enable")


class StageModule:
    """One stage, ready to run.

    The parameters and buffers given are used as they are: gradients accumulate in them, and buffers (such as
    BatchNorm's statistics) are updated in place.

    Attributes:
        program: What it runs.
        parameters: Its parameters by canonical name.
        buffers: Its buffers by canonical name.
    """

    def __init__(
        self,
        program: StageProgram,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        """Load ``program``.

        Args:
            program: What to run.
            parameters: At least the program's parameters. One that is not an ``nn.Parameter`` yet is made one, on the
                same storage, with ``requires_grad`` as the program says.
            buffers: At least the program's buffers.
            constants: At least the program's constants.
            device: Where it runs; tensors must be there already.

        Raises:
            ProgramError: If a tensor is missing or has another shape or dtype than the program says.
        """
        self.program = program
        self.device = device
        self.parameters: dict[str, nn.Parameter] = {}
        for name, info in program.parameters.items():
            tensor = _take(parameters, name, info)
            if not isinstance(tensor, nn.Parameter):
                tensor = nn.Parameter(tensor, requires_grad=info.requires_grad)
            self.parameters[name] = tensor
        self.buffers: dict[str, Tensor] = {name: _take(buffers, name, info) for name, info in program.buffers.items()}
        self.constants = {
            name: _take(constants, name, info).to(device) for name, info in program.constant_infos.items()
        }
        self._plans = {True: _Plan(program.train, device), False: _Plan(program.eval, device)}

    def random(self, training: bool) -> bool:
        """Whether a run in this mode draws random numbers."""
        return self.program.random(training)

    def run(
        self,
        inputs: Sequence[Tensor],
        training: bool,
        parameters: Mapping[str, Tensor] | None = None,
    ) -> list[Tensor]:
        """Run the program under the caller's grad mode and autocast.

        Args:
            inputs: The values of the cut before the first layer, in order.
            training: Which mode to run.
            parameters: Stand-ins for some of the parameters, for example another weight version.

        Returns:
            The values of the cut after the last layer, in order.

        Raises:
            ValueError: If the number of inputs is wrong, or where plain PyTorch raises it.
        """
        weights: Mapping[str, Tensor] = self.parameters if parameters is None else {**self.parameters, **parameters}
        stored = {"parameter": weights, "buffer": self.buffers, "constant": self.constants}
        return self._plans[training].run(inputs, stored)


def _take(tensors: Mapping[str, Tensor], name: str, info: TensorInfo) -> Tensor:
    what = {ParameterInfo: "parameter", BufferInfo: "buffer"}.get(type(info), "constant")
    if name not in tensors:
        raise ProgramError(f"the stage program needs the {what} {name!r}, which is not among the tensors given")
    tensor = tensors[name]
    if tuple(tensor.shape) != info.shape or tensor.dtype != info.dtype:
        raise ProgramError(
            f"{what} {name!r} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, "
            f"the stage program says {info.shape} and {info.dtype}"
        )
    return tensor


class _Slot:
    """Where an argument comes from: an index into the values of one run."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _Step:
    """One operation with its arguments resolved as far as they can be before the run."""

    __slots__ = ("args", "check", "frees", "function", "kwargs", "node", "result")

    def __init__(self, node: Node, slot: Callable[[Ref], _Slot], device: torch.device, result: int) -> None:
        self.node = node
        op = get_op(node.op)
        self.function = op.function
        self.check = ARGUMENT_CHECKS.get(node.op)
        self.args = [_prepare(value, slot, device) for value in node.args]
        self.kwargs = {name: _prepare(value, slot, device) for name, value in node.kwargs.items()}
        for position, argument in enumerate(op.arguments):
            # As torch.nn.functional does, this machine decides about cuDNN, not the one that traced.
            if argument.name in _CUDNN_FLAGS and position < len(self.args):
                self.args[position] = torch.backends.cudnn.enabled
        self.result = result
        self.frees: tuple[int, ...] = ()

    def execute(self, values: list[Any]) -> None:
        """Run it on the values computed so far."""
        args = [_resolve(value, values) for value in self.args]
        kwargs = {name: _resolve(value, values) for name, value in self.kwargs.items()}
        if self.check is not None:
            self.check(args, kwargs)
        values[self.result] = self.function(*args, **kwargs)
        for index in self.frees:
            values[index] = None


class _Nest(list[Any]):
    """A list argument that holds slots."""


def _prepare(value: Any, slot: Callable[[Ref], _Slot], device: torch.device) -> Any:
    if value is STAGE_DEVICE:
        return device
    if isinstance(value, list | tuple):
        items = [_prepare(item, slot, device) for item in value]
        return _Nest(items) if any(True for _ in find_refs(value)) else items
    return map_refs(value, slot)


def _resolve(value: Any, values: list[Any]) -> Any:
    kind = type(value)
    if kind is _Slot:
        return values[value.index]
    if kind is _Nest:
        return [_resolve(item, values) for item in value]
    return value


class _Plan:
    """One mode of a program, compiled to steps over numbered slots."""

    def __init__(self, mode: ModeProgram, device: torch.device) -> None:
        slots: dict[Ref, _Slot] = {}

        def slot(ref: Ref) -> _Slot:
            return slots.setdefault(ref, _Slot(len(slots)))

        self._device = device
        self._inputs = [slot(Ref("value", value.name)).index for value in mode.inputs]
        steps = [_Step(node, slot, device, slot(Ref("value", node.name)).index) for node in mode.nodes]
        self._outputs = [slot(Ref("value", name)).index for name in mode.outputs]
        self._stored = [(ref, place.index) for ref, place in slots.items() if ref.kind != "value"]
        self._count = len(slots)
        last: dict[int, int] = {index: 0 for index in self._inputs}
        for position, step in enumerate(steps):
            last[step.result] = position
            for ref in step.node.refs():
                last[slots[ref].index] = position
        kept = {*self._outputs, *(index for _, index in self._stored)}
        frees: dict[int, list[int]] = {}
        for index, position in last.items():
            if index not in kept:
                frees.setdefault(position, []).append(index)
        for position, step in enumerate(steps):
            step.frees = tuple(frees.get(position, ()))
        self._groups = _group(steps)

    def run(self, inputs: Sequence[Tensor], stored: Mapping[str, Mapping[str, Tensor]]) -> list[Tensor]:
        if len(inputs) != len(self._inputs):
            raise ValueError(f"the stage takes {len(self._inputs)} tensors, got {len(inputs)}")
        values: list[Any] = [None] * self._count
        for index, tensor in zip(self._inputs, inputs, strict=True):
            values[index] = tensor
        for ref, index in self._stored:
            values[index] = stored[ref.kind][ref.name]
        for grad, autocast, steps in self._groups:
            if grad is None and autocast is None:
                for step in steps:
                    step.execute(values)
            else:
                with _region(grad, autocast, self._device):
                    for step in steps:
                        step.execute(values)
        return [values[index] for index in self._outputs]


def _group(steps: list[_Step]) -> list[tuple[bool | None, Autocast | None, list[_Step]]]:
    groups: list[tuple[bool | None, Autocast | None, list[_Step]]] = []
    for step in steps:
        grad, autocast = step.node.grad, step.node.autocast
        if not groups or groups[-1][:2] != (grad, autocast):
            groups.append((grad, autocast, []))
        groups[-1][2].append(step)
    return groups


@contextmanager
def _region(grad: bool | None, autocast: Autocast | None, device: torch.device) -> Iterator[None]:
    with ExitStack() as stack:
        if grad is not None:
            stack.enter_context(torch.set_grad_enabled(grad))
        if autocast is not None:
            stack.enter_context(torch.autocast(device.type, autocast.dtype, autocast.enabled))
        yield
