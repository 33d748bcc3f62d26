"""StageExecutor: forward, backward and update of one stage. Knows no network and no Lightning."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_accept.graph import StageModule
from lightning_accept.pipeline import optimizers as optim
from lightning_accept.pipeline.buffer_history import BufferHistory
from lightning_accept.pipeline.handover import part_of
from lightning_accept.pipeline.messages import PipelineError, StageState
from lightning_accept.pipeline.prediction import predict_weights

RANDOM_LOCK = threading.Lock()  # stages that share a process share the global random state too


class NonFiniteActivation(PipelineError):
    """An activation or a gradient holds NaN or infinity."""


@dataclass(frozen=True)
class Job:
    """One unit of work: a micro-batch of a batch.

    Attributes:
        number: Position among all training jobs of the term.
        batch: Number of the batch.
        micro: Number of the micro-batch within it.
        updates: True if the batch is expected to end with an optimizer step (False within gradient accumulation).
    """

    number: int
    batch: int
    micro: int = 0
    updates: bool = True


@dataclass
class _Version:
    """Weights that batches in flight were forwarded with (weight stashing), and how many updates they lacked."""

    weights: dict[str, Tensor]
    staleness: int


@dataclass
class _Stash:
    job: Job
    version: _Version
    inputs: list[Tensor]
    outputs: list[Tensor]


class StageExecutor:
    """Runs one stage with weight versions.

    Forward and backward of a batch use the same weights, those of the moment when its first micro-batch was
    forwarded, or, with weight prediction, those expected when its update comes. Order is the caller's business.

    Args:
        module: The stage.
        optimizers: One per optimizer of the LightningModule; None where it has no parameters in this stage. Empty
            where somebody else steps the parameters: then :meth:`take_gradients` hands the gradients over.
        weight_prediction: Predict weights for batches in flight.
        scale_lr: Divide the learning rate of every update by the staleness of its gradient.
        shared_optimizers: The optimizers are the user's own, which also hold parameters of other stages: step only this
            stage's, and leave param group options and other gradients as they were.
        seed: Where not None, random operations (dropout) of every job are seeded by ``seed``, batch and micro-batch.
            None leaves the global random state alone, as plain training does.
        stage: Number of this stage, for messages and seeds.
        history: Leaves jobs that are outstanding out of the buffers that :meth:`gather` returns. None where a forward
            counts as soon as it is done, as in plain training.
    """

    def __init__(
        self,
        module: StageModule,
        optimizers: Sequence[Optimizer | None],
        *,
        weight_prediction: bool,
        scale_lr: bool = False,
        seed: int | None,
        stage: int,
        shared_optimizers: bool = False,
        history: BufferHistory | None = None,
    ) -> None:
        self.module = module
        self.optimizers = list(optimizers)
        self.stage = stage
        self.updates_done = 0
        """Number of optimizer steps taken since the deployment."""
        self._weight_prediction = weight_prediction
        self._scale_lr = scale_lr
        self._staleness = 0  # the largest among the gradients that wait for their update
        self._seed = seed
        self._shared_optimizers = shared_optimizers
        self._history = history or BufferHistory({})
        self._names: dict[nn.Parameter, str] = {p: name for name, p in module.parameters.items()}
        self._stashes: dict[int, _Stash] = {}
        self._by_batch: dict[int, _Version] = {}
        self._current: tuple[int, _Version] | None = None
        self._gradients: dict[str, Tensor] = {}
        self._unstepped: set[str] = set()  # whose gradients no optimizer step has used yet

    @property
    def outstanding(self) -> list[Job]:
        """Jobs forwarded and not yet backwarded, oldest first."""
        return [stash.job for stash in self._stashes.values()]

    def staleness(self) -> int:
        """Updates that will come between a forward now and its own update."""
        return len({stash.job.batch for stash in self._stashes.values() if stash.job.updates})

    def forward(
        self, job: Job, inputs: Sequence[Tensor], needs_grad: Sequence[bool], autocast: str | None = None
    ) -> tuple[list[Tensor], list[bool]]:
        """Forward one micro-batch in train mode and keep what its backward needs.

        Args:
            job: The job.
            inputs: Input tensors of the stage, in the program's order.
            needs_grad: For each input, whether its gradient is wanted upstream.
            autocast: Name of the autocast dtype (``bfloat16``), or None.

        Returns:
            The outputs, detached, and for each whether it needs a gradient.

        Raises:
            NonFiniteActivation: If an output that needs a gradient holds NaN or infinity.
        """
        version = self._version_for(job)
        leaves = [
            tensor.detach().requires_grad_() if wanted and tensor.is_floating_point() else tensor.detach()
            for tensor, wanted in zip(inputs, needs_grad, strict=True)
        ]
        self._history.begin(job.number)
        with torch.inference_mode(False), torch.enable_grad(), self._autocast(autocast), self._random(job):
            outputs = self.module.run(leaves, training=True, parameters=version.weights)
        self._stashes[job.number] = _Stash(job, version, leaves, outputs)
        for index, output in enumerate(outputs):
            if output.requires_grad:
                check_finite(output, f"output {index} of stage {self.stage} in the forward of batch {job.batch}")
        return [output.detach() for output in outputs], [output.requires_grad for output in outputs]

    def backward(self, job: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Backward the job forwarded under this number and add to the stage's gradients.

        Args:
            job: Number of the job.
            gradients: For each output the gradient of the loss, None where there is none.

        Returns:
            For each input its gradient, None where none is wanted or the loss does not depend on it.

        Raises:
            NonFiniteActivation: If a gradient holds NaN or infinity.
        """
        stash = self._take(job)
        self._history.end(job)
        self._staleness = max(self._staleness, stash.version.staleness)
        label = f"stage {self.stage} in the backward of batch {stash.job.batch}"
        pairs = []
        for index, (output, gradient) in enumerate(zip(stash.outputs, gradients, strict=True)):
            if gradient is not None and output.requires_grad:
                check_finite(gradient, f"gradient of output {index} of {label}")
                pairs.append((output, gradient.to(output.device, output.dtype)))
        wanted = [leaf for leaf in stash.inputs if leaf.requires_grad]
        weights = {name: w for name, w in stash.version.weights.items() if w.requires_grad}
        results: tuple[Tensor | None, ...] = (None,) * (len(wanted) + len(weights))
        if pairs and results:
            results = torch.autograd.grad(
                [output for output, _ in pairs],
                [*wanted, *weights.values()],
                [gradient for _, gradient in pairs],
                allow_unused=True,
            )
        for name, result in zip(weights, _apart(results, len(wanted)), strict=True):
            if result is not None:
                known = self._gradients.get(name)
                self._gradients[name] = result if known is None else known + result
                self._unstepped.add(name)
        of_input = iter(results[: len(wanted)])
        return [next(of_input) if leaf.requires_grad else None for leaf in stash.inputs]

    def skip(self, job: int, undo: bool = False) -> None:
        """Forget the job forwarded under this number; it will not be backwarded.

        Args:
            job: Number of the job.
            undo: Whether buffers, too, are to be as if neither it nor any job after it had been forwarded.
        """
        self._take(job)
        if undo:
            self._history.undo(job)
        else:
            self._history.end(job)

    def run(self, inputs: Sequence[Tensor], training: bool, autocast: str | None = None) -> list[Tensor]:
        """Forward without gradients on the newest weights, disturbing nothing that is in flight.

        Args:
            inputs: Input tensors of the stage.
            training: Train mode (statistics of BatchNorm are updated) or eval mode.
            autocast: Name of the autocast dtype, or None.
        """
        with self._history.running(), torch.no_grad(), self._autocast(autocast):
            return [tensor.detach() for tensor in self.module.run(inputs, training=training)]

    def zero_gradients(self, index: int) -> None:
        """Drop the gradients added up for the parameters of optimizer ``index``."""
        optimizer = self.optimizers[index]
        for parameter in self._own_parameters(optimizer) if optimizer is not None else ():
            self._gradients.pop(self._names[parameter], None)
            self._unstepped.discard(self._names[parameter])

    def gradients_of(self, index: int) -> list[Tensor]:
        """The gradients added up for the parameters of optimizer ``index``."""
        return [self._gradients[name] for name in self._names_of(index)]

    def scale_gradients(self, index: int, factor: float) -> None:
        """Multiply the gradients added up for the parameters of optimizer ``index``."""
        for name in self._names_of(index):
            self._gradients[name] = self._gradients[name] * factor

    def clamp_gradients(self, index: int, limit: float) -> None:
        """Bring every element of the gradients of optimizer ``index`` within ``-limit`` and ``limit``."""
        for name in self._names_of(index):
            self._gradients[name] = self._gradients[name].clamp(-limit, limit)

    def step(self, index: int, groups: optim.HyperParameters, keep_gradients: bool = False) -> None:
        """Update the weights by optimizer ``index`` from the gradients added up so far.

        Args:
            index: Number of the optimizer.
            groups: Hyper-parameters of every param group, as on the central node.
            keep_gradients: Leave the gradients for :meth:`zero_gradients`, as plain PyTorch does.
        """
        optimizer = self.optimizers[index]
        if optimizer is not None:
            with self._undisturbed(optimizer):
                optim.apply_hyper_parameters(optimizer, self._scaled(groups, self._staleness))
                mine = self._own_parameters(optimizer)
                self._protect_versions(mine)
                for parameter in mine:
                    parameter.grad = self._gradients.get(self._names[parameter])
                optimizer.step()
                for parameter in mine:
                    parameter.grad = None
                    self._unstepped.discard(self._names[parameter])
                if not keep_gradients:
                    self.zero_gradients(index)
                if self._scale_lr:
                    optim.apply_hyper_parameters(optimizer, groups)  # predictions scale for themselves
        self._staleness = 0
        self.updates_done += 1
        self._current = None

    def take_gradients(self) -> dict[str, Tensor]:
        """Hand over the gradients added up so far, by parameter name, and start from nothing."""
        gradients, self._gradients = self._gradients, {}
        self._unstepped.clear()
        return gradients

    def unstepped_gradients(self) -> dict[str, Tensor]:
        """Gradients added up for an optimizer step that is yet to come, by parameter name."""
        optimizers = [optimizer for optimizer in self.optimizers if optimizer is not None]
        stepped = {self._names[p] for optimizer in optimizers for p in self._own_parameters(optimizer)}
        return {name: self._gradients[name] for name in sorted(self._unstepped & stepped)}

    def restore_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Put gradients in that :meth:`unstepped_gradients` took elsewhere; those of other stages are ignored."""
        for name, gradient in gradients.items():
            if name in self.module.parameters:
                self._gradients[name] = gradient.to(self.module.parameters[name].device, copy=True)
                self._unstepped.add(name)

    def weights_changed(self) -> None:
        """Tell that somebody else has changed the parameters."""
        self._current = None

    def gather(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Scalars and tensors (``param/``, ``buffer/``, ``optim/`` and ``grad/``) that make up the stage's state.

        With a history, jobs that are outstanding have left no trace in it.
        """
        scalars, tensors = optim.pack_state(self.optimizers, self._names)
        tensors.update({f"param/{name}": p.detach() for name, p in self.module.parameters.items()})
        buffers = {**self.module.buffers, **self._history.settled()}
        tensors.update({f"buffer/{name}": buffer.detach() for name, buffer in buffers.items()})
        tensors.update({f"grad/{name}": gradient for name, gradient in self.unstepped_gradients().items()})
        return {"optimizers": scalars, "updates": self.updates_done}, tensors

    def hand_over(self, names: Sequence[str] | None) -> StageState:
        """The part of the state that belongs to ``names``, or all of it, constants included; nothing is copied.

        Raises:
            ValueError: If the stage does not hold one of the names.
        """
        spec, tensors = self.gather()
        tensors.update({f"const/{name}": constant for name, constant in self.module.constants.items()})
        state = StageState(spec, tensors)
        return state if names is None else part_of(state, names)

    def restore_optimizers(self, scalars: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor]) -> None:
        """Put optimizer state in that :meth:`gather` took elsewhere."""
        optim.unpack_state(self.optimizers, self.module.parameters, scalars, tensors)

    def _take(self, job: int) -> _Stash:
        stash = self._stashes.pop(job, None)
        if stash is None:
            raise PipelineError(f"stage {self.stage} holds no forward of job {job}")
        if all(other.job.batch != stash.job.batch for other in self._stashes.values()):
            self._by_batch.pop(stash.job.batch, None)
        return stash

    def _version_for(self, job: Job) -> _Version:
        known = self._by_batch.get(job.batch)
        if known is None:
            updates = self.staleness() if self._weight_prediction or self._scale_lr else 0
            if self._current is None or self._current[0] != updates:
                self._current = (updates, self._make_version(updates))
            known = self._by_batch[job.batch] = self._current[1]
        return known

    def _make_version(self, updates: int) -> _Version:
        moves = updates * self._lr_share(updates) if self._weight_prediction else 0
        predicted = predict_weights(self.optimizers, moves)
        weights = {}
        for name, parameter in self.module.parameters.items():
            # `.data` shares the storage but not autograd's version counter: an update that comes before the backward
            # replaces the storage first (_protect_versions) instead of being reported as a modified saved tensor.
            weights[name] = predicted.get(parameter, parameter.data).requires_grad_(parameter.requires_grad)
        return _Version(weights, updates)

    def _lr_share(self, staleness: int) -> float:
        """What is left of the learning rate for gradients so many updates old (PipeMare, arXiv 1910.05124)."""
        return 1.0 / max(1, staleness) if self._scale_lr else 1.0

    def _scaled(self, groups: optim.HyperParameters, staleness: int) -> optim.HyperParameters:
        share = self._lr_share(staleness)
        return groups if share == 1.0 else [{**group, "lr": share * group["lr"]} for group in groups]

    def _protect_versions(self, parameters: Sequence[nn.Parameter]) -> None:
        """Before an update: move to new storage the parameters that batches in flight still need."""
        held = {w.data_ptr() for stash in self._stashes.values() for w in stash.version.weights.values()}
        for parameter in parameters:
            if parameter.data_ptr() in held:
                parameter.data = parameter.data.clone()

    def _names_of(self, index: int) -> list[str]:
        """Names of the parameters of optimizer ``index`` that have a gradient."""
        optimizer = self.optimizers[index]
        own = self._own_parameters(optimizer) if optimizer is not None else ()
        return [self._names[parameter] for parameter in own if self._names[parameter] in self._gradients]

    def _own_parameters(self, optimizer: Optimizer) -> list[nn.Parameter]:
        return [p for group in optimizer.param_groups for p in group["params"] if p in self._names]

    @contextmanager
    def _undisturbed(self, optimizer: Optimizer) -> Iterator[None]:
        """Keep a shared optimizer's options, and the gradients of parameters that are not of this stage."""
        if not self._shared_optimizers:
            yield
            return
        groups = optim.hyper_parameters(optimizer)
        others = [p for g in optimizer.param_groups for p in g["params"] if p not in self._names and p.grad is not None]
        gradients = [p.grad for p in others]
        for parameter in others:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in zip(others, gradients, strict=True):
                parameter.grad = gradient
            optim.apply_hyper_parameters(optimizer, groups)

    def _autocast(self, dtype: str | None) -> Any:
        if dtype is None:
            return nullcontext()
        return torch.autocast(self.module.device.type, dtype=getattr(torch, dtype))

    @contextmanager
    def _random(self, job: Job) -> Iterator[None]:
        if self._seed is None or not self.module.random(training=True):
            yield
            return
        with RANDOM_LOCK, torch.random.fork_rng(devices=_cuda_devices(self.module.device)):
            torch.manual_seed(job_seed(self._seed, self.stage, job))
            yield


def job_seed(seed: int, stage: int, job: Job) -> int:
    """The seed of one job's random operations; the same wherever and whenever it runs."""
    mask = 0xFFFFFFFFFFFFFFFF
    mixed = seed & mask
    for value in (stage, job.batch, job.micro):  # SplitMix64 (Steele et al. 2014), one round for each
        mixed = (mixed + 0x9E3779B97F4A7C15 * (value + 1)) & mask
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
        mixed ^= mixed >> 31
    return mixed >> 1


def check_finite(tensor: Tensor, what: str) -> None:
    """Refuse NaN and infinity.

    Raises:
        NonFiniteActivation: Naming ``what``.
    """
    # The sum is finite if and only if all summands are, overflow aside; it costs one pass and no second tensor.
    if not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
        kind = "NaN" if torch.isnan(tensor).any() else "infinity"
        raise NonFiniteActivation(f"{what} holds {kind}; look at the input data and the learning rate")


def _apart(results: Sequence[Tensor | None], first: int) -> list[Tensor | None]:
    """``results`` from ``first`` on, none of which shares its memory with another: they may be changed in place."""
    seen = {result.data_ptr() for result in results[:first] if result is not None}
    apart = []
    for result in results[first:]:
        if result is not None and result.data_ptr() in seen:
            result = result.clone()
        elif result is not None:
            seen.add(result.data_ptr())
        apart.append(result)
    return apart


def _cuda_devices(device: torch.device) -> list[int]:
    return [device.index or 0] if device.type == "cuda" else []
