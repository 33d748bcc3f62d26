"""From layers and a partition to one deployment per worker."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_accept.codecs import Codec, codec_config
from lightning_accept.graph import Chain, Trace
from lightning_accept.partition.schedule import Schedule
from lightning_accept.pipeline import optimizers as optim
from lightning_accept.pipeline.messages import Deployment
from lightning_accept.pipeline.transport import WorkerHandle

QUEUE_MARGIN = 4


@dataclass(frozen=True)
class Settings:
    """What holds for all stages of a run.

    Attributes:
        forward_codec: For activations while training.
        backward_codec: For gradients.
        eval_codec: For activations in validation, test and predict.
        weight_prediction: Forward with predicted weights while batches are in flight.
        seed: Seeds the random operations of batches in flight.
    """

    forward_codec: Codec
    backward_codec: Codec
    eval_codec: Codec
    weight_prediction: bool
    seed: int


def resolve_partition(partition: Sequence[int | str], layers: Sequence[str], workers: int) -> list[int]:
    """Index of the first layer of every worker's stage.

    Args:
        partition: For every worker the first layer of its stage, by index or name.
        layers: Names of all layers.
        workers: Number of workers.

    Raises:
        ValueError: If it does not fit the layers or the workers; the message lists what there is.
    """
    if len(partition) != workers:
        raise ValueError(
            f"partition={list(partition)} names {len(partition)} first layers, but there are {workers} workers; give"
            " the first layer of every worker's stage"
        )
    starts = []
    for entry in partition:
        if isinstance(entry, str):
            if entry not in layers:
                raise ValueError(f"partition names layer {entry!r}; the layers are {', '.join(layers)}")
            starts.append(layers.index(entry))
        else:
            starts.append(int(entry))
    edges = [0, *starts, len(layers)]
    if any(first >= second for first, second in itertools.pairwise(edges)):
        raise ValueError(
            f"partition={list(partition)} does not rise strictly from 1 to {len(layers) - 1}; every stage, the central"
            f" node's too, needs at least one of the layers 0 to {len(layers) - 1}"
        )
    return starts


def make_deployments(
    trace: Trace,
    chain: Chain,
    starts: Sequence[int],
    schedule: Schedule,
    optimizers: Sequence[Optimizer],
    settings: Settings,
    workers: Sequence[WorkerHandle],
    *,
    gradients: Mapping[str, Tensor],
    run: str,
    term: int,
    link_token: str,
) -> list[Deployment]:
    """One deployment per worker, with the current weights, optimizer state and ``gradients`` of its layers."""
    edges = [*starts, len(chain.layers)]
    synchronous = schedule.synchronous
    codecs = {
        "forward": codec_config(settings.forward_codec),
        "backward": codec_config(settings.backward_codec),
        "evaluate": codec_config(settings.eval_codec),
    }
    deployments = []
    for index in range(len(workers)):
        program = chain.program(edges[index], edges[index + 1])
        parameters = {name: trace.parameters[name] for name in program.parameters}
        names: dict[nn.Parameter, str] = {parameter: name for name, parameter in parameters.items()}
        scalars, tensors = optim.pack_state(optimizers, names)
        spec: dict[str, Any] = {
            "program": program.to_json(),
            "optimizers": [optim.describe(optimizer, names) for optimizer in optimizers],
            "optimizer_state": scalars,
            "window": None if synchronous else schedule.windows[index],
            "queue_limit": schedule.in_flight * schedule.micro_batches + QUEUE_MARGIN,
            "weight_prediction": settings.weight_prediction and not synchronous,
            "seed": None if synchronous else settings.seed,
            "codecs": codecs,
        }
        all_tensors: dict[str, Tensor] = {f"param/{name}": p.detach().cpu() for name, p in parameters.items()}
        all_tensors.update({f"buffer/{name}": trace.buffers[name].detach().cpu() for name in program.buffers})
        all_tensors.update({f"const/{name}": constant.cpu() for name, constant in program.constants.items()})
        all_tensors.update({name: tensor.cpu() for name, tensor in tensors.items()})
        all_tensors.update({f"grad/{name}": gradients[name].cpu() for name in parameters if name in gradients})
        deployments.append(
            Deployment(
                run=run,
                term=term,
                stage=index + 1,
                stages=len(workers) + 1,
                spec=spec,
                tensors=all_tensors,
                upstream=workers[index - 1].address if index > 0 else None,
                downstream=workers[index + 1].address if index + 1 < len(workers) else None,
                link_token=link_token,
            )
        )
    return deployments
