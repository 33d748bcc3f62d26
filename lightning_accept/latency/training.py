"""Pre-training of the latency predictor on the profiles of many device configurations."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_accept.latency.dataset import Dataset
from lightning_accept.latency.estimate import expected, linear_estimate, log_times, network_input, span_masks
from lightning_accept.latency.network import DualStream
from lightning_accept.latency.pretrained import Pretrained
from lightning_accept.latency.profiles import Profiles, fit_profiles, profile_features
from lightning_accept.latency.submodels import all_spans, representatives
from lightning_accept.partition.times import Floats

MEMBERS = 4
"""Members of the ensemble; each leaves out its part of the configurations, which then judge it."""
FEWEST = 8
"""Device configurations below which no network is trained: it could only learn them by heart."""
MIXED = 3
"""Devices mixed into one made-up device; such mixtures are as plausible as the devices themselves."""
INPUT_NOISE = 0.02
"""Standard deviation of the noise added to the log times of h."""
STEPS, CHECK_EVERY, DEVICES = 300, 20, 12
RATE, DECAY = 1e-2, 1e-2
LEAST_GAIN = 0.03
"""Share of the squared error that the network must take off on devices not trained on, to be used at all."""

Indices: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class _Remainder:
    """What the linear estimate leaves of each device, which that estimate was not fitted to."""

    inputs: Floats  # [devices, 2 * spans of h]
    left: Floats  # [devices, M, 2], not a number where not measured
    spread: Floats  # [devices, M, 2]


def pretrain(dataset: Dataset, *, count: int = 10, steps: int = STEPS, seed: int = 0) -> Pretrained:
    """Train a predictor.

    The reference and the spread of profiles are fitted first. What they leave unexplained on configurations they were
    not fitted to is what the network learns, and as much of its output is used as configurations it was not trained
    on confirm.

    Args:
        dataset: Measurements of all sub-models on as many device configurations as can be had.
        count: Sub-models that make up h.
        steps: Of training the network; 0 for no network.
        seed: Of everything random. Leaves torch's and numpy's own generators alone.

    Raises:
        ValueError: If there are no configurations, one has nothing of h, or a sub-model was measured on none.
    """
    layers = len(dataset.model.layers)
    spans = representatives(dataset.model.flops, count)
    rows = [all_spans(layers).index(span) for span in spans]
    logs = _table(dataset, rows)
    shuffled = np.random.default_rng(seed).permutation(len(logs))
    parts: list[Indices] = [shuffled[part::MEMBERS] for part in range(min(MEMBERS, len(logs)))]
    reference, profiles = _fit(logs, rows, layers)
    network, scale, weight, calibration = None, 1.0, (0.0, 0.0), 1.0
    if len(parts) > 1:
        rest = _remainder(logs, rows, layers, parts, reference)
        missed = rest.left
        if len(logs) >= FEWEST and steps > 0:
            scale = max(float(rest.inputs.std()), 1e-3)
            network, outputs = _train(rest, parts, layers, scale, steps, seed)
            weight = _confirmed(outputs, rest.left)
            missed = rest.left - outputs * np.array(weight)
            if not any(weight):
                network = None
        calibration = float(np.sqrt(np.nanmean(np.square(missed / rest.spread))))
    return Pretrained(
        layers=dataset.model.layers,
        flops=dataset.model.flops,
        batch=dataset.model.batch,
        spans=tuple(spans),
        configurations=tuple(one.name for one in dataset.configurations),
        reference=reference,
        profiles=profiles,
        network=network,
        network_input=scale,
        network_output=weight,
        calibration=max(calibration, 0.5),
    )


def _table(dataset: Dataset, rows: list[int]) -> Floats:
    """Log times of all configurations, ``[devices, M, 2]``, not a number where not measured."""
    order = {span: row for row, span in enumerate(all_spans(len(dataset.model.layers)))}
    logs = np.full((len(dataset.configurations), len(order), 2), np.nan)
    for own, configuration in zip(logs, dataset.configurations, strict=True):
        own[[order[one.span] for one in configuration.measured]] = log_times(configuration.measured)
        if not np.isfinite(own[rows]).any():
            raise ValueError(
                f"configuration {configuration.name!r} has no time of any representative sub-model; leave it out"
            )
    if not len(logs):
        raise ValueError("pre-training needs at least one device configuration")
    for span, row in order.items():
        if not np.isfinite(logs[:, row]).any():
            raise ValueError(f"no configuration has a time for the layers {span}; measure all sub-models")
    return logs


def _fit(
    logs: Floats, rows: list[int], layers: int, otherwise: Floats | None = None
) -> tuple[Floats, tuple[Profiles, Profiles]]:
    """Reference, ``[M, 2]``, and profiles, forward and backward; ``otherwise`` for what none of these devices has."""
    level = np.nanmean(logs[:, rows], axis=(1, 2))
    # A sub-model that some device lacks must not shift with the speed of those that have it.
    for _ in range(10 if np.isnan(logs).any() else 1):
        centred = logs - (level - level.mean())[:, None, None]
        counts = np.isfinite(centred).sum(0)
        reference = np.nansum(centred, 0) / np.maximum(counts, 1)
        if otherwise is not None:
            reference = np.where(counts > 0, reference, otherwise)
        level = np.nanmean(logs[:, rows] - reference[rows], axis=(1, 2)) + level.mean()
    above = logs - reference - (level - level.mean())[:, None, None]
    forward, backward = (
        fit_profiles(above[:, :, column], profile_features(reference[:, column], layers)) for column in (0, 1)
    )
    return reference, (forward, backward)


def _remainder(logs: Floats, rows: list[int], layers: int, parts: list[Indices], reference: Floats) -> _Remainder:
    """What the linear estimate of each device leaves, fitted to the devices of the other parts."""
    inputs = np.zeros((len(logs), 2 * len(rows)))
    left, spread = np.zeros_like(logs), np.zeros_like(logs)
    for part in parts:
        others = np.delete(np.arange(len(logs)), part)
        own_reference, profiles = _fit(logs[others], rows, layers, reference)
        for device in part:
            known = [row for row in rows if np.isfinite(logs[device, row]).all()]
            linear = linear_estimate(own_reference, profiles, known, logs[device, known])
            everywhere = expected(own_reference, linear)
            inputs[device] = network_input(own_reference, rows, known, logs[device, known], everywhere)
            left[device] = logs[device] - everywhere
            spread[device] = linear.spread()
    return _Remainder(inputs, left, spread)


def _train(
    rest: _Remainder, parts: list[Indices], layers: int, scale: float, steps: int, seed: int
) -> tuple[DualStream, Floats]:
    """The network, and for each device the outputs of the member that was not trained on it, ``[devices, M, 2]``.

    Each member keeps the weights with which it did best on its own part.
    """
    devices = len(rest.inputs)
    network = DualStream(layers, rest.inputs.shape[1], members=len(parts), seed=seed)
    best = copy.deepcopy(network)
    inputs = torch.as_tensor(rest.inputs / scale, dtype=torch.float32)
    targets = torch.as_tensor(np.nan_to_num(rest.left), dtype=torch.float32)
    known = torch.as_tensor(np.isfinite(rest.left), dtype=torch.float32)
    masks = span_masks(layers)
    held = torch.zeros(len(parts), devices)
    for member, part in enumerate(parts):
        held[member, torch.as_tensor(part)] = 1.0
    size = max(float(np.nanstd(rest.left)), 1e-4)
    lowest = torch.full((len(parts),), float("inf"))
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps + 1):
        if step % CHECK_EVERY == 0 or step == steps:
            with torch.no_grad():
                missed = (network(masks, inputs[None]) * size - targets).square() * known
                judged = (missed.mean((2, 3)) * held).sum(1)
            better = judged < lowest
            lowest = torch.where(better, judged, lowest)
            for kept, now in zip(best.parameters(), network.parameters(), strict=True):
                kept.data[better] = now.data[better]
        if step == steps:
            break
        mix = _mixtures(1.0 - held, generator)
        noise = torch.randn(*mix.shape[:2], inputs.shape[1], generator=generator) * (INPUT_NOISE / scale)
        outputs = network(masks, mix @ inputs + noise) * size
        wanted = torch.einsum("edn,nmo->edmo", mix, targets)
        # What one of the mixed devices lacks counts as far as the others have it.
        share = torch.einsum("edn,nmo->edmo", mix, known)
        loss = (nn.functional.smooth_l1_loss(outputs / size, wanted / size, reduction="none") * share).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    best.requires_grad_(False)
    best.last.weight.mul_(size)
    best.last.bias.mul_(size)
    outputs = best(masks, inputs[None])
    return best, (outputs * held[:, :, None, None]).sum(0).double().numpy()


def _mixtures(allowed: Tensor, generator: torch.Generator) -> Tensor:
    """Weights of real devices in made-up ones, ``[members, DEVICES, devices]``.

    Args:
        allowed: 1 for the devices each member may see, ``[members, devices]``.
        generator: Source of randomness.
    """
    members, devices = allowed.shape
    count = min(MIXED, int(allowed.sum(1).min()))
    chance = torch.rand(members, DEVICES, devices, generator=generator) * allowed[:, None]
    chosen = chance.topk(count, -1).indices
    # Powers of uniform numbers: now and then a device alone, mostly one with a bit of the others.
    parts = torch.rand(members, DEVICES, count, generator=generator).pow(3) + 1e-3
    return torch.zeros_like(chance).scatter_(2, chosen, parts / parts.sum(-1, keepdim=True))


def _confirmed(outputs: Floats, left: Floats) -> tuple[float, float]:
    """The factors of forward and backward outputs that leave least on devices not trained on; from 0 to 1."""
    factors = []
    for column in (0, 1):
        known = np.isfinite(left[:, :, column])
        own, wanted = outputs[:, :, column][known], left[:, :, column][known]
        factor = float(np.clip((own @ wanted) / max(float(own @ own), 1e-12), 0.0, 1.0))
        gained = 1.0 - float(np.square(wanted - factor * own).sum() / max(float(np.square(wanted).sum()), 1e-12))
        factors.append(factor if gained > LEAST_GAIN else 0.0)
    return factors[0], factors[1]
