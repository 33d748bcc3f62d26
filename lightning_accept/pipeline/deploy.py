"""From layers and a partition to one deployment per worker."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_accept.codecs import Codec, Raw, codec_config
from lightning_accept.graph import Chain
from lightning_accept.partition.schedule import Schedule
from lightning_accept.pipeline import optimizers as optim
from lightning_accept.pipeline.crossing import cut_bytes, small_output
from lightning_accept.pipeline.handover import nbytes
from lightning_accept.pipeline.messages import Deployment, PipelineError, Sources
from lightning_accept.pipeline.placement import Target
from lightning_accept.pipeline.transport import WorkerHandle
from lightning_accept.progress import ProgressLine

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
        compress_output: Whether the module's output and its gradient go through the codecs too; None where they are
            not small.
        scale_lr: Divide every stage's learning rate by the staleness of its gradients.
    """

    forward_codec: Codec
    backward_codec: Codec
    eval_codec: Codec
    weight_prediction: bool
    seed: int
    compress_output: bool | None = None
    scale_lr: bool = False

    def compresses_output(self, chain: Chain) -> bool:
        """Whether the output of ``chain`` and its gradient go through the codecs."""
        return not small_output(cut_bytes(chain)) if self.compress_output is None else self.compress_output

    def output_codecs(self, chain: Chain) -> tuple[Codec, Codec]:
        """The codecs for the output of ``chain`` and for its gradient, while training."""
        return (self.forward_codec, self.backward_codec) if self.compresses_output(chain) else (Raw(), Raw())


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


def choose_workers(
    claimed: Sequence[WorkerHandle],
    wanted: Sequence[WorkerHandle] | None,
    starts: Sequence[int],
    schedule: Schedule,
) -> list[WorkerHandle]:
    """The workers that hold stages: ``wanted``, or by default all that are claimed.

    Raises:
        PipelineError: If they are not some of the claimed ones in their order, or do not fit stages and schedule.
    """
    chosen = list(claimed if wanted is None else wanted)
    names = [worker.name for worker in chosen]
    places = [next((place for place, known in enumerate(claimed) if known is worker), -1) for worker in chosen]
    if not chosen or places[0] < 0 or any(first >= second for first, second in itertools.pairwise(places)):
        raise PipelineError(
            f"stages cannot be put on {', '.join(names) or 'no workers'}: give some of the claimed workers"
            f" ({', '.join(worker.name for worker in claimed)}) in this order"
        )
    if not len(chosen) == len(starts) == len(schedule.windows):
        raise PipelineError(
            f"{len(starts)} stages with {len(schedule.windows)} windows do not fit the {len(chosen)} workers"
            f" {', '.join(names)}; give one first layer and one window per worker"
        )
    return chosen


def make_deployments(
    target: Target,
    settings: Settings,
    *,
    gradients: Mapping[str, Tensor],
    run: str,
    term: int,
    link_token: str,
    sources: Sequence[Sources] | None = None,
) -> list[Deployment]:
    """One deployment per worker, with the current weights, optimizer state and ``gradients`` of its layers.

    Args:
        target: Which worker is to hold which layers, and how they are trained.
        settings: What holds for all stages.
        gradients: Gradients that wait for their optimizer step, by parameter name.
        run: The run.
        term: The term.
        link_token: The run's link token.
        sources: For every worker what its deployment leaves out, since workers hold it. None leaves nothing out.
    """
    trace, chain, schedule, workers = target.trace, target.chain, target.schedule, target.workers
    edges = [*target.starts, len(chain.layers)]
    synchronous = schedule.synchronous
    output_codec, _ = settings.output_codecs(chain)
    deployments = []
    for index in range(len(workers)):
        last = index == len(workers) - 1
        codecs = {
            "forward": codec_config(output_codec if last else settings.forward_codec),
            "backward": codec_config(settings.backward_codec),
            "evaluate": codec_config(settings.eval_codec),
        }
        program = chain.program(edges[index], edges[index + 1])
        held = {name for names in sources[index].names.values() for name in names} if sources is not None else set()
        names: dict[nn.Parameter, str] = {trace.parameters[name]: name for name in program.parameters}
        sent = {parameter: name for parameter, name in names.items() if f"param/{name}" not in held}
        scalars, tensors = optim.pack_state(target.optimizers, sent)
        spec: dict[str, Any] = {
            "program": program.to_json(),
            "optimizers": [optim.describe(optimizer, names) for optimizer in target.optimizers],
            "optimizer_state": scalars,
            "window": None if synchronous else schedule.windows[index],
            "queue_limit": schedule.in_flight * schedule.micro_batches + QUEUE_MARGIN,
            "weight_prediction": settings.weight_prediction and not synchronous,
            "scale_lr": settings.scale_lr and not synchronous,
            "seed": None if synchronous else settings.seed,
            "codecs": codecs,
        }
        tensors.update({f"param/{name}": parameter for parameter, name in sent.items()})
        tensors.update({f"buffer/{name}": trace.buffers[name] for name in program.buffers})
        tensors.update({f"const/{name}": constant for name, constant in program.constants.items()})
        tensors.update({f"grad/{name}": gradients[name] for name in sent.values() if name in gradients})
        deployments.append(
            Deployment(
                run=run,
                term=term,
                stage=index + 1,
                stages=len(workers) + 1,
                spec=spec,
                tensors={name: tensor.detach().cpu() for name, tensor in tensors.items() if name not in held},
                upstream=workers[index - 1].address if index > 0 else None,
                downstream=workers[index + 1].address if index + 1 < len(workers) else None,
                link_token=link_token,
                sources=None if sources is None else sources[index],
            )
        )
    return deployments


def put_in_place(deployments: Sequence[tuple[WorkerHandle, Deployment]], progress: ProgressLine) -> None:
    """Send every worker its stage, all at the same time; ``progress`` shows the bytes of those that stand.

    Raises:
        PipelineError: If a worker refuses its stage.
    """
    count, total = len(deployments), sum(nbytes(deployment) for _, deployment in deployments)
    with progress.show(f"deploying {count} stages", total, "B") as shown, ThreadPoolExecutor(count) as pool:
        # From the last to the first: a stage may send as soon as it stands, and must find its neighbour there.
        sent = {pool.submit(worker.deploy, deployment): nbytes(deployment) for worker, deployment in deployments[::-1]}
        for done, future in enumerate(as_completed(sent), 1):
            future.result()
            shown.advance(sent[future], f"deploying: {done} of {count} stages in place")
