"""The central node's sending ends: to the first worker, and to the last."""

from __future__ import annotations

from collections.abc import Callable

from lightning_accept.codecs import Codec
from lightning_accept.pipeline.messages import Packet, PipelineError, Transfer, TransportError
from lightning_accept.pipeline.recorder import StageRecorder
from lightning_accept.pipeline.sender import Sender
from lightning_accept.pipeline.transport import WorkerHandle


def sender_to(
    worker: WorkerHandle,
    stage: int,
    codec: Codec,
    eval_codec: Codec,
    *,
    run: str,
    term: int,
    recorder: StageRecorder,
    overlap: bool,
    fail: Callable[[BaseException], None],
) -> Sender:
    """A sender to the worker that holds ``stage``; ``fail`` is called with what goes wrong, in words for the user.

    With ``overlap``, packets may arrive in another order than they were sent in.
    """
    return Sender(
        f"link from stage 0 to stage {stage}",
        _WorkerChannel(worker),
        codec,
        eval_codec,
        run=run,
        term=term,
        recorder=recorder,
        peer=stage,
        overlap=overlap,
        on_error=lambda doing, error: fail(_explain(doing, error)),
    )


class _WorkerChannel:
    """A worker's handle as a channel that may be closed without closing the worker."""

    overlaps = True

    def __init__(self, worker: WorkerHandle) -> None:
        self._worker = worker

    def send(self, packet: Packet, on_left: Callable[[], None] | None = None) -> Transfer | None:
        return self._worker.send(packet, on_left)

    def close(self) -> None:
        pass


def _explain(doing: str, error: BaseException) -> BaseException:
    if isinstance(error, PipelineError):
        return error
    wrapped = TransportError(f"{doing} failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
