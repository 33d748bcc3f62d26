"""Moving layers between stages: only what changes hands travels, from its owner to its owner to be."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

from lightning_accept.pipeline.handover import completed, joined, nbytes
from lightning_accept.pipeline.messages import Deployment, PipelineError, SourceUnreachable, StageState, TransportError
from lightning_accept.pipeline.placement import Holding
from lightning_accept.pipeline.transport import WorkerHandle

log = logging.getLogger("lightning_accept")

T = TypeVar("T")
_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class MoveReport:
    """What a move took.

    Attributes:
        nbytes: Bytes of weights, buffers, constants, optimizer state and gradients that travelled, on all links.
        layers: How many layers changed hands.
        seconds: From the drained pipeline to the one that is ready again.
    """

    nbytes: int
    layers: int
    seconds: float


class Calls:
    """Calls of several workers at once, given up as soon as one fails or the pipeline does.

    Args:
        workers: All workers; their calls in progress are interrupted when one fails.
        check: Raises what has gone wrong with the pipeline meanwhile, if anything has.
        on_done: Called whenever a call has succeeded.
    """

    def __init__(
        self, workers: Sequence[WorkerHandle], check: Callable[[], None], on_done: Callable[[], None] = lambda: None
    ) -> None:
        self._workers = workers
        self._check = check
        self._on_done = on_done

    def all(self, calls: Iterable[Callable[[], T]]) -> list[T]:
        """The results of all ``calls`` in their order.

        Raises:
            BaseException: What the first call that failed raised, or ``check``. Workers are of no use after that.
        """
        calls = list(calls)
        with ThreadPoolExecutor(max(1, len(calls)), thread_name_prefix="call worker") as pool:
            futures = [pool.submit(call) for call in calls]
            try:
                self._wait(futures)
            except BaseException:
                for worker in self._workers:
                    worker.close()
                raise
        return [future.result() for future in futures]

    def _wait(self, futures: Sequence[Future[T]]) -> None:
        pending: set[Future[T]] = set(futures)
        while pending:
            done, pending = wait(pending, _LOOK_SECONDS, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
                self._on_done()
            self._check()


def fetch(calls: Calls, fetched: Sequence[tuple[WorkerHandle, list[str]]], term: int, timeout: float) -> StageState:
    """What the central node takes over from workers that still stand in ``term``."""

    def fetch_one(worker: WorkerHandle, names: list[str]) -> Callable[[], StageState]:
        return lambda: worker.handover(term, names, timeout)

    return joined(calls.all(fetch_one(worker, names) for worker, names in fetched))


def put(
    calls: Calls,
    deployments: Sequence[tuple[WorkerHandle, Deployment]],
    before: Sequence[Holding],
    timeout: float,
) -> int:
    """Put all stages in place of those of an earlier term; returns the bytes that travelled.

    Args:
        calls: Calls the workers.
        deployments: Every worker with its new stage.
        before: What stages hold so far.
        timeout: Seconds within which every worker must have fetched what others hold and built its stage.
    """
    owners = {holding.worker.address: holding.worker for holding in before if holding.worker is not None}

    def put_one(worker: WorkerHandle, deployment: Deployment) -> Callable[[], int]:
        return lambda: _put_one(worker, deployment, owners, timeout)

    # From the last to the first: a stage may send as soon as it stands, and must find its neighbour there.
    return sum(calls.all(put_one(worker, deployment) for worker, deployment in reversed(deployments)))


def _put_one(worker: WorkerHandle, deployment: Deployment, owners: dict[str, WorkerHandle], timeout: float) -> int:
    carried = 0
    while True:
        carried += nbytes(deployment)
        try:
            return carried + worker.deploy(deployment, timeout)
        except SourceUnreachable as error:
            sources = deployment.sources
            if sources is None or error.address not in sources.names or error.address not in owners:
                raise
            owner = owners[error.address]
            log.warning("%s; its layers go by way of the central node", error)
            try:
                part = owner.handover(sources.term, sources.names[error.address], timeout)
            except TransportError as second:
                raise TransportError(f"{error}. By way of the central node it failed too: {second}") from second
            carried += nbytes(part)
            deployment = completed(deployment, part, error.address)


def forget(calls: Calls, placements: Sequence[Holding], term: int) -> None:
    """Let all workers of these placements drop what they kept of the time before ``term``."""
    workers = {id(holding.worker): holding.worker for holding in placements if holding.worker is not None}

    def forget_one(worker: WorkerHandle) -> Callable[[], None]:
        return lambda: worker.forget(term)

    calls.all(forget_one(worker) for worker in workers.values())


def broken_off(error: BaseException) -> BaseException:
    """``error`` as that which has ended the pipeline."""
    if isinstance(error, PipelineError):
        return error
    wrapped = PipelineError(f"a move of layers was broken off: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
