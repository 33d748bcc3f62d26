"""The order in which every stage does its tasks."""

from __future__ import annotations

from typing import Literal, TypeAlias

from lightning_accept.partition.schedule import Schedule

Kind: TypeAlias = Literal["forward", "backward", "loss"]

Task: TypeAlias = tuple[Kind, int]
"""What to do, and for which job; a loss counts batches."""


def central_order(schedule: Schedule, batches: int) -> list[Task]:
    """The central node's order of work, dictated by the training loop, which takes one batch after the other."""
    micro = schedule.micro_batches

    def jobs(kind: Kind, batch: int) -> list[Task]:
        return [(kind, job) for job in range(batch * micro, (batch + 1) * micro)]

    order: list[Task] = []
    begun = 0
    for batch in range(batches):
        while begun < min(batch + schedule.forward_lead, batches):
            order += jobs("forward", begun)
            begun += 1
        order.append(("loss", batch))
        if batch >= schedule.backward_lag:
            order += jobs("backward", batch - schedule.backward_lag)
    for batch in range(max(batches - schedule.backward_lag, 0), batches):
        order += jobs("backward", batch)
    return order


def worker_order(window: int, jobs: int) -> list[Task]:
    """A worker's strict 1F1B order with its drain."""
    order: list[Task] = [("forward", job) for job in range(min(window, jobs))]
    for job in range(jobs):
        order.append(("backward", job))
        if job + window < jobs:
            order.append(("forward", job + window))
    return order


def orders(schedule: Schedule, batches: int) -> list[list[Task]]:
    """The order of every stage; the synchronous mode drains the workers after each batch."""
    micro = schedule.micro_batches
    all_orders = [central_order(schedule, batches)]
    for window in schedule.windows:
        if schedule.synchronous:
            one = worker_order(micro, micro)
            all_orders.append([(kind, batch * micro + job) for batch in range(batches) for kind, job in one])
        else:
            all_orders.append(worker_order(window, batches * micro))
    return all_orders


def staleness(order: list[Task], micro: int, batch: int) -> int:
    """Updates missing when the first job of ``batch`` is forwarded; the stage updates after a batch's last backward."""
    before = order[: order.index(("forward", batch * micro))]
    done = sum(kind == "backward" for kind, _ in before)
    return batch - done // micro


def stashed(order: list[Task]) -> int:
    """Jobs forwarded and not yet backwarded, at most."""
    most = now = 0
    for kind, _ in order:
        now += (kind == "forward") - (kind == "backward")
        most = max(most, now)
    return most
