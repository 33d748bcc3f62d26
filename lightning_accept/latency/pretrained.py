"""What pre-training leaves: the reference, how devices vary around it, and the network, in one file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lightning_accept.latency.network import DualStream
from lightning_accept.latency.profiles import Profiles, profile_features
from lightning_accept.latency.submodels import Span, all_spans
from lightning_accept.partition.times import Floats

FORMAT = "lightning-accept latency predictor"
VERSION = 1


@dataclass(frozen=True)
class Pretrained:
    """A trained predictor of one model.

    Attributes:
        layers: Names of the model's layers.
        flops: Forward FLOPs of each.
        batch: Batch size of the training data.
        spans: The sub-models whose times make up h.
        configurations: Names of the device configurations trained on.
        reference: Mean log times over these, ``[M, 2]``, forward and backward, of all sub-models in the order of
            :func:`all_spans`, each device's own level taken out.
        profiles: How devices deviate from it, forward and backward.
        network: What the deviations of h say beyond that; None where too few configurations were there to learn it.
        network_input: Standard deviation of h's deviations.
        network_output: What the network's outputs are multiplied by, forward and backward: as much as configurations
            it was not trained on confirmed.
        calibration: Errors on configurations not trained on, over those expected.
    """

    layers: tuple[str, ...]
    flops: tuple[float, ...]
    batch: int
    spans: tuple[Span, ...]
    configurations: tuple[str, ...]
    reference: Floats
    profiles: tuple[Profiles, Profiles]
    network: DualStream | None
    network_input: float
    network_output: tuple[float, float]
    calibration: float

    def check(self, flops: Sequence[float], names: Sequence[str]) -> None:
        """Refuse another model. Its batch size may differ, since only ratios of FLOPs are compared.

        Raises:
            ValueError: If the layers' number, names or share of the FLOPs differ.
        """
        advice = "; pre-train a predictor for this model, or use latency='measured'"
        if len(flops) != len(self.layers):
            raise ValueError(f"the predictor is for {len(self.layers)} layers, the model has {len(flops)}{advice}")
        for index, (trained, given) in enumerate(zip(self.layers, names, strict=False)):
            if trained != given:
                raise ValueError(f"layer {index} is {trained!r} for the predictor but {given!r} in the model{advice}")
        trained_sum, given_sum = max(sum(self.flops), 1e-9), max(sum(flops), 1e-9)
        for index, (own, other) in enumerate(zip(self.flops, flops, strict=True)):
            if abs(own / trained_sum - other / given_sum) > 0.01:
                raise ValueError(
                    f"layer {index} has {own / trained_sum:.1%} of the model's FLOPs for the predictor but "
                    f"{other / given_sum:.1%} in the model{advice}"
                )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as safetensors; a file that is there is replaced at once or not at all."""
        tensors = {"reference": torch.from_numpy(self.reference)}
        for name, profiles in zip(("forward", "backward"), self.profiles, strict=True):
            tensors[f"{name}.covariance"] = torch.from_numpy(profiles.covariance)
        if self.network is not None:
            tensors |= {f"network.{name}": value for name, value in self.network.state_dict().items()}
        header = {
            "format": FORMAT,
            "version": VERSION,
            "layers": self.layers,
            "flops": self.flops,
            "batch": self.batch,
            "spans": self.spans,
            "configurations": self.configurations,
            "noise": [profiles.noise for profiles in self.profiles],
            "alike": [profiles.alike for profiles in self.profiles],
            "network": None if self.network is None else self.network.sizes,
            "network_input": self.network_input,
            "network_output": self.network_output,
            "calibration": self.calibration,
        }
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            save_file(
                {name: value.contiguous() for name, value in tensors.items()}, partial, {"header": json.dumps(header)}
            )
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Pretrained:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: If the file is something else, or damaged.
            OSError: If it cannot be read.
        """
        Path(path).stat()
        try:
            with safe_open(os.fspath(path), "pt") as file:
                header = json.loads((file.metadata() or {})["header"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if header["format"] != FORMAT or header["version"] != VERSION:
                raise ValueError(f"its format is {header['format']!r}, version {header['version']!r}")
            return cls._from(header, tensors)
        except Exception as error:
            raise ValueError(f"{os.fspath(path)} is no latency predictor of version {VERSION}: {error}") from error

    @classmethod
    def _from(cls, header: dict[str, Any], tensors: dict[str, Tensor]) -> Pretrained:
        layers = len(header["layers"])
        known = set(all_spans(layers))
        spans = tuple((int(first), int(stop)) for first, stop in header["spans"])
        reference = _array(tensors, "reference", (len(known), 2))
        profiles = []
        for column, name in enumerate(("forward", "backward")):
            covariance = _array(tensors, f"{name}.covariance", (layers + 1, layers + 1))
            features = profile_features(reference[:, column], layers)
            noise, alike = float(header["noise"][column]), float(header["alike"][column])
            if not (math.isfinite(noise) and noise > 0 and 0 <= alike <= 1):
                raise ValueError(f"its noise {noise} or likeness {alike} of the {name} is not proper")
            profiles.append(Profiles(features, covariance, noise, alike))
        if not spans or not known.issuperset(spans) or len(header["flops"]) != layers:
            raise ValueError("its header contradicts itself")
        network = None
        if header["network"] is not None:
            sizes = {name: int(header["network"][name]) for name in DualStream(1, 1, 1, 1, 1).sizes}
            if (sizes["layers"], sizes["profile"], sizes["outputs"]) != (layers, 2 * len(spans), 2):
                raise ValueError("its network does not fit its layers")
            network = DualStream(**sizes)
            prefix = "network."
            own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
            network.load_state_dict(own)
            network.requires_grad_(False)
        values = (float(header["network_input"]), *(float(one) for one in header["network_output"]))
        if not all(map(math.isfinite, values)):
            raise ValueError("its header holds no proper numbers")
        return cls(
            layers=tuple(str(name) for name in header["layers"]),
            flops=tuple(float(one) for one in header["flops"]),
            batch=int(header["batch"]),
            spans=spans,
            configurations=tuple(str(name) for name in header["configurations"]),
            reference=reference,
            profiles=(profiles[0], profiles[1]),
            network=network,
            network_input=values[0],
            network_output=(values[1], values[2]),
            calibration=float(header["calibration"]),
        )


def _array(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> Floats:
    value: Floats = tensors[name].numpy().astype(np.float64)
    if value.shape != shape or not np.isfinite(value).all():
        raise ValueError(f"{name} has shape {value.shape} instead of {shape}, or is not finite")
    return value
