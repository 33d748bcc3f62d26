"""One call of torch.export, made quiet, free of side effects and honest about what went wrong."""

from __future__ import annotations

import contextlib
import io
import linecache
import logging
import os
import random
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from traceback import FrameSummary, extract_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.modules import transformer

from lightning_accept.graph.errors import TraceError
from lightning_accept.graph.structure import InputStructure, OutputStructure, split_output

PREFIX = "module."
"""What the exporter puts before the names of the module's own parameters, buffers and submodules."""

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(__file__) + os.sep
_ASSIGNED = re.compile(r"The tensor attributes? (.*) (?:was|were) assigned during export")


@dataclass(frozen=True)
class Capture:
    """What one export gives: the program and the structure of the output."""

    program: ExportedProgram
    output: OutputStructure


class _Flat(nn.Module):
    """Wraps the module so that it takes and returns plain tensors."""

    def __init__(self, module: nn.Module, structure: InputStructure, seen: list[OutputStructure]) -> None:
        super().__init__()
        self.module = module
        self._rebuild = structure.rebuild
        self._report = seen.append

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        before = dict(self.module.named_buffers())
        args, kwargs = self._rebuild(tensors)
        structure, outputs = split_output(self.module(*args, **kwargs))
        # The exporter drops an assignment such as `self.mean = ...` to a registered buffer; keep it as an update.
        for name, buffer in self.module.named_buffers():
            if name in before and buffer is not before[name]:
                with torch.no_grad():
                    before[name].copy_(buffer)
        self._report(structure)
        return tuple(outputs)


def capture(
    module: nn.Module,
    structure: InputStructure,
    examples: Sequence[Tensor],
    dynamic: Sequence[frozenset[int]],
) -> Capture:
    """Export ``module`` in the mode it is in.

    Args:
        module: The module.
        structure: How its arguments nest.
        examples: The tensors among them.
        dynamic: For each tensor, the dimensions that may vary.

    Raises:
        TraceError: If it cannot be exported.
    """
    seen: list[OutputStructure] = []
    mode = "train" if module.training else "eval"
    shapes = tuple({dim: Dim.AUTO for dim in dims} for dims in dynamic)
    flat = _Flat(module, structure, seen)
    flat.training = module.training
    try:
        with _without_mask_detection(), _quiet() as caught:
            program = export(flat, tuple(examples), dynamic_shapes={"tensors": shapes}, strict=False)
    except TraceError:
        raise
    except Exception as error:
        raise _explain(error, mode) from error
    _warn_about_attributes(caught)
    return Capture(program, seen[-1])


@contextlib.contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Put everything back at the end: training flags, attributes, requires_grad, and the random number generators.

    Raises:
        TraceError: At the end, if forward has overwritten a tensor that is neither parameter nor buffer.
    """
    plain = [
        (name, value, value._version, value.clone())
        for child_name, child in module.named_modules()
        for name, value in ((f"{child_name}.{key}".lstrip("."), value) for key, value in child.__dict__.items())
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.is_inference()
    ]
    attributes = [(child, dict(child.__dict__)) for child in module.modules()]
    registries = [
        (registry, dict(registry))
        for child in module.modules()
        for registry in (child._parameters, child._buffers, child._modules)
    ]
    flags = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    devices = list(range(torch.cuda.device_count())) if torch.cuda._initialized else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            for parameter, flag in flags:
                if parameter.requires_grad != flag:
                    parameter.requires_grad_(flag)
            for child, saved in attributes:
                _restore(child.__dict__, saved)
            for registry, entries in registries:
                _restore(registry, entries)
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)
            changed = [(name, tensor, saved) for name, tensor, version, saved in plain if tensor._version != version]
            for _, tensor, original in changed:
                tensor.data.copy_(original)
    if changed:
        raise TraceError(
            f"forward overwrites the tensor self.{changed[0][0]}, which is neither a parameter nor a buffer; "
            "register it with register_buffer"
        )


def _restore(entries: dict[str, Any], saved: dict[str, Any]) -> None:
    for name in [name for name in entries if name not in saved]:
        del entries[name]
    for name, value in saved.items():
        if name not in entries or entries[name] is not value:
            entries[name] = value


@contextlib.contextmanager
def _quiet() -> Iterator[list[warnings.WarningMessage]]:
    """Keep the exporter's own warnings, log lines and printed graphs from the user; yields the warnings."""
    loggers = [logging.getLogger(name) for name in ("torch.export", "torch._export", "torch.fx", "torch._dynamo")]
    children = [
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and name.startswith(("torch.", "torch"))
    ]
    disabled = [(logger, logger.disabled) for logger in {*loggers, *children}]
    try:
        for logger, _ in disabled:
            logger.disabled = True
        with (
            warnings.catch_warnings(record=True) as caught,
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("always")
            yield caught
    finally:
        for logger, state in disabled:
            logger.disabled = state


@contextlib.contextmanager
def _without_mask_detection() -> Iterator[None]:
    """Keep nn.TransformerEncoder and the like from looking at a mask's values to see whether it is a causal one.

    The answer only chooses a kernel; the mask is applied either way.
    """
    original = getattr(transformer, "_detect_is_causal_mask", None)
    if original is None:
        yield
        return

    def undetected(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        return bool(is_causal)

    transformer._detect_is_causal_mask = undetected
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = original


def _warn_about_attributes(caught: Sequence[warnings.WarningMessage]) -> None:
    """Pass on the one warning that matters: tensors that forward keeps in plain attributes."""
    for entry in caught:
        match = _ASSIGNED.match(str(entry.message))
        if match is None:
            continue
        names = [name.strip().replace(f"self.{PREFIX}", "self.") for name in match.group(1).split(",")]
        names = [name for name in names if "._flat_weights[" not in name]
        if names:
            warnings.warn(
                f"forward assigns tensors to {', '.join(names)}; these attributes will not be updated in the pipeline "
                "(register them with register_buffer if their values matter)",
                stacklevel=2,
            )


def _explain(error: Exception, mode: str) -> TraceError:
    place = _user_line(error)
    if isinstance(error, GuardOnDataDependentSymNode):
        reason = "the value of a tensor decides what Python does next"
        cure = (
            "Write it without Python control flow on tensor values (torch.where, masks), move it out of the pipelined "
            "module, or pipeline a submodule without it (AccEPTStrategy(module=...))."
        )
    else:
        reason = _first_lines(error)
        cure = (
            "Change that line so that torch.export can follow it, or pipeline a submodule without it "
            "(AccEPTStrategy(module=...))."
        )
    return TraceError(f"the pipelined module cannot be exported in {mode} mode: {reason}{place}\n{cure}")


def _first_lines(error: Exception) -> str:
    text = str(error).strip()
    for marker in ("\nCaused by:", "\nFor more information", "\nThe error above occurred", "\nconsider using", "\n\n"):
        text = text.split(marker)[0]
    return f"{type(error).__name__}: {text.strip()[:500]}"


def _user_line(error: BaseException) -> str:
    """Where in the user's code it happened; failing that, where in torch.nn."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    library: FrameSummary | None = None
    for link in chain:
        frames = extract_tb(link.__traceback__)
        own = [frame for frame in frames if _is_users(frame.filename)]
        # The frames above the exporter belong to the caller, not to the module.
        inside = [frame for frame in own if _below_wrapper(frames, frame)]
        if inside:
            return _describe_frame(inside[-1])
        modules = [f for f in frames if f.filename.startswith(os.path.join(_TORCH, "nn", "modules"))]
        modules = [f for f in modules if os.path.basename(f.filename) != "module.py"]
        library = library or (modules[-1] if modules else None)
    return _describe_frame(library) if library is not None else ""


def _is_users(filename: str) -> bool:
    return not filename.startswith((_TORCH, _HERE, "<"))


def _below_wrapper(frames: Sequence[FrameSummary], frame: FrameSummary) -> bool:
    wrapper = [i for i, f in enumerate(frames) if f.filename == __file__ and f.name == "forward"]
    return bool(wrapper) and frames.index(frame) > wrapper[0]


def _describe_frame(frame: FrameSummary) -> str:
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"\n  {frame.filename}:{frame.lineno}, in {frame.name}: {line}"
