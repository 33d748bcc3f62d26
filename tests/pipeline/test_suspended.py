"""Steps that stop at the pipelined call."""

from __future__ import annotations

import threading

import pytest
import torch

from lightning_accept.pipeline.suspended import Call, SuspendedStep


def call_pipeline(value: int) -> int:
    step = SuspendedStep.current()
    assert step is not None
    result: int = step.wait_for_output(Call((value,), {}, None))
    return result


def test_a_step_stops_at_the_call_and_goes_on_with_its_output() -> None:
    order = []

    def function() -> int:
        order.append("before")
        got = call_pipeline(7)
        order.append("after")
        return got + 1

    step = SuspendedStep(function, "test")
    call = step.start()
    assert call is not None
    assert call.args == (7,)
    order.append("between")
    assert step.resume(41) == 42
    assert order == ["before", "between", "after"]
    assert step.finished


def test_a_step_without_the_call_runs_to_its_end() -> None:
    step = SuspendedStep(lambda: 5, "test")
    assert step.start() is None
    assert step.resume(None) == 5


def test_errors_before_and_after_the_call_reach_the_caller() -> None:
    def early() -> None:
        raise KeyError("early")

    def late() -> None:
        call_pipeline(0)
        raise KeyError("late")

    with pytest.raises(KeyError, match="early"):
        SuspendedStep(early, "test").start()
    step = SuspendedStep(late, "test")
    step.start()
    with pytest.raises(KeyError, match="late"):
        step.resume(0)


def test_an_abandoned_step_unwinds_and_its_thread_ends() -> None:
    unwound = threading.Event()

    def function() -> None:
        try:
            call_pipeline(0)
        except Exception:
            pytest.fail("an abandoned step must not look like an error of the user's")
        finally:
            unwound.set()

    before = threading.active_count()
    step = SuspendedStep(function, "test")
    step.start()
    step.abandon()
    assert unwound.is_set()
    assert threading.active_count() == before


@pytest.mark.parametrize("inference", [True, False])
def test_grad_mode_is_the_callers(inference: bool) -> None:
    def function() -> tuple[bool, bool]:
        call_pipeline(0)
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    with torch.inference_mode(inference):
        step = SuspendedStep(function, "test")
        step.start()
        assert step.resume(0) == (not inference, inference)


def test_what_is_deferred_is_done_when_the_step_goes_on() -> None:
    done = []

    def function() -> None:
        step = SuspendedStep.current()
        assert step is not None
        assert step.early
        step.deferred.append(lambda: done.append("logged"))
        call_pipeline(0)
        assert done == ["logged"]
        assert not step.early

    step = SuspendedStep(function, "test")
    step.start()
    assert done == []
    step.resume(0)
    assert done == ["logged"]
