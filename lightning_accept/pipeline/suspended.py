"""A user's step that stops at the pipelined call and goes on when the output is there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_current = threading.local()


@dataclass
class Call:
    """The pipelined call at which a step is suspended.

    Attributes:
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        autocast: Name of the autocast dtype in force at the call, or None.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: str | None


class _Abandoned(BaseException):
    """Unwinds a suspended step that will never go on. Not an Exception, so that user code does not catch it."""


class SuspendedStep:
    """Runs a function in a thread of its own that takes turns with the caller's: a coroutine, not parallelism.

    A thread because grad mode and autocast belong to a thread; both start out as they are in the caller's. The default
    dtype, which some of Lightning's precisions change within a step, belongs to the process; it is exchanged at every
    turn.

    Args:
        function: The user's step.
        name: Names the thread.
    """

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        self.call: Call | None = None
        """The call at which the step is suspended, or None."""
        self.finished = False
        self.deferred: list[Callable[[], None]] = []
        """What the step asked for before its turn (logging); done when it goes on."""
        self._function = function
        self._result: Any = None
        self._error: BaseException | None = None
        self._output: Any = None
        self._abandoned = False
        self._go = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._dtype = torch.get_default_dtype()
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @staticmethod
    def current() -> SuspendedStep | None:
        """The step whose thread this is, or None."""
        return getattr(_current, "step", None)

    @property
    def early(self) -> bool:
        """Whether the step is still on its way to its first pipelined call, ahead of its turn."""
        return self.call is None and not self.finished and self._output is None

    def start(self) -> Call | None:
        """Run until the pipelined call, which is returned, or until the end (None)."""
        with self._own_default_dtype():
            self._thread.start()
            self._stopped.acquire()
        self._raise()
        return self.call

    def resume(self, output: Any) -> Any:
        """Let the pipelined call return ``output`` and run to the end; returns the step's result."""
        if not self.finished:
            self._output = (output,)
            with self._own_default_dtype():
                self._go.release()
                self._stopped.acquire()
            self._raise()
        else:
            self._do_deferred()
        return self._result

    def abandon(self) -> None:
        """Unwind the suspended step."""
        if not self.finished and self._thread.ident is not None:
            self._abandoned = True
            with self._own_default_dtype():
                self._go.release()
                self._thread.join()

    def wait_for_output(self, call: Call) -> Any:
        """Called by the step's own thread at the pipelined call: let the other thread go on until it resumes this."""
        self.call = call
        self._stopped.release()
        self._go.acquire()
        if self._abandoned:
            raise _Abandoned
        self._do_deferred()
        return self._output[0]

    @contextmanager
    def _own_default_dtype(self) -> Iterator[None]:
        """The step's turn: give it the default dtype that it left with, and the caller its own afterwards."""
        outer = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            yield
        finally:
            self._dtype = torch.get_default_dtype()
            torch.set_default_dtype(outer)

    def _do_deferred(self) -> None:
        deferred, self.deferred = self.deferred, []
        for action in deferred:
            action()

    def _run(self) -> None:
        _current.step = self
        try:
            with torch.inference_mode(self._inference), torch.set_grad_enabled(self._grad):
                self._result = self._function()
        except _Abandoned:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self.finished = True
            self._stopped.release()

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
