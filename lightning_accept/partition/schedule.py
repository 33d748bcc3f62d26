"""The pipeline's schedule: how many batches are in flight, and in which order every stage works."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """The fixed order of forwards and backwards on every stage.

    The central node begins the forward of batch ``j + forward_lead`` when the loop asks for batch ``j + 1``, and ends
    iteration ``j`` with the stage-0 backward of batch ``j - backward_lag``. Worker s runs ``windows[s - 1]`` forwards
    first, then strictly one backward, one forward, and so on; in a drain, backwards only.

    A schedule that could deadlock cannot be built. Worker 1 must not wait for a job that the central node begins only
    after a backward that worker 1 has yet to do; since the central node begins and completes whole batches, that means
    ``windows[0] <= (in_flight - 1) * micro_batches + 1`` (``in_flight`` when a batch is one job). No worker may wait
    for more than its predecessor sends, so windows never grow along the chain; and the loss needs all jobs of a
    batch, so each is at least ``micro_batches``.

    Attributes:
        in_flight: Batches begun and not fully backwarded, at most; 1 is the synchronous mode, where every batch is
            drained before the next begins.
        windows: For every worker, the jobs (micro-batches) that it forwards before its first backward.
        backward_lag: Batches by which the central node's backward trails its loss (D_b).
        micro_batches: Jobs per batch.

    Raises:
        ValueError: If the schedule could deadlock or a number is out of range.
    """

    in_flight: int
    windows: tuple[int, ...]
    backward_lag: int
    micro_batches: int = 1

    def __post_init__(self) -> None:
        """Refuse what could deadlock."""
        if self.in_flight < 1:
            raise ValueError(f"in_flight must be at least 1, not {self.in_flight}")
        if self.micro_batches < 1:
            raise ValueError(f"micro_batches must be at least 1, not {self.micro_batches}")
        if not 0 <= self.backward_lag < self.in_flight:
            raise ValueError(
                f"backward_lag must be in 0..{self.in_flight - 1} (below in_flight), not {self.backward_lag}"
            )
        if any(earlier < later for earlier, later in zip(self.windows, self.windows[1:], strict=False)):
            raise ValueError(f"windows {self.windows} would deadlock: they must not grow from one worker to the next")
        if any(window < self.micro_batches for window in self.windows):
            raise ValueError(
                f"windows {self.windows} would deadlock: the loss needs all {self.micro_batches} micro-batches of a "
                "batch, so each window must be at least that"
            )
        if any(window > self.largest_window for window in self.windows):
            raise ValueError(
                f"windows {self.windows} would deadlock: with {self.in_flight} batches of {self.micro_batches} jobs in "
                f"flight a window is at most {self.largest_window}; raise in_flight or lower the windows"
            )

    @property
    def forward_lead(self) -> int:
        """Batches that the central node has begun when the loop takes one, that one included (D_f)."""
        return self.in_flight - self.backward_lag

    @property
    def synchronous(self) -> bool:
        """Whether every batch is finished before the next begins."""
        return self.in_flight == 1

    @property
    def largest_window(self) -> int:
        """The most jobs that worker 1 may forward first without deadlock."""
        return self.micro_batches if self.synchronous else (self.in_flight - 1) * self.micro_batches + 1

    @property
    def staleness(self) -> tuple[int, ...]:
        """How many updates old the weights are in a forward of the steady state, for every stage from 0 on.

        In-flight minus 1 on stage 0. On a worker with window w the first job of a batch is forwarded when all but the
        w - 1 jobs before it are backwarded: ceil((w - 1) / micro_batches) batches whose update is missing.
        """
        if self.synchronous:
            return (0,) * (len(self.windows) + 1)
        return (self.in_flight - 1, *(-(-(window - 1) // self.micro_batches) for window in self.windows))


def default_schedule(workers: int, in_flight: int | None = None, micro_batches: int = 1) -> Schedule:
    """A good schedule for fast links and stages of equal work; ``choose_schedule`` knows better.

    Window of worker s: the largest allowed one less s, which is ``in_flight - s`` where a batch is one job. The largest
    windows themselves would make worker 1 wait for a forward that the central node begins only after the backward of a
    whole batch, and so take turns with it. The backward lag is that of :func:`usual_lag`.

    Args:
        workers: Number of workers, the central node left out.
        in_flight: Batches in flight; None takes ``2 + workers / micro_batches``, rounded up.
        micro_batches: Jobs per batch.

    Raises:
        ValueError: If a number is out of range.
    """
    if workers < 0:
        raise ValueError(f"the number of workers must not be negative, not {workers}")
    if micro_batches < 1:
        raise ValueError(f"micro_batches must be at least 1, not {micro_batches}")
    if in_flight is None:
        in_flight = 2 - (-workers // micro_batches)
    if in_flight == 1:
        return Schedule(1, (micro_batches,) * workers, 0, micro_batches)
    largest = (in_flight - 1) * micro_batches + 1
    windows = tuple(max(micro_batches, largest - worker) for worker in range(1, workers + 1))
    return Schedule(in_flight, windows, usual_lag(in_flight), micro_batches)


def usual_lag(in_flight: int) -> int:
    """The backward lag for stages of equal work and links without delay.

    A backward takes about twice as long as a forward, so that two thirds of a batch's way through the pipeline are its
    backward.

    Args:
        in_flight: Batches in flight, 2 at least.
    """
    return max(1, (2 * in_flight - 2) // 3)
