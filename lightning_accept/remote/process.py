"""A daemon as the whole business of a process: signals, threads, and an end that is certain."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

import torch

from lightning_accept.garbage import settle
from lightning_accept.remote.server import ServerOptions, serve
from lightning_accept.remote.tenancy import StageFactory

STOP_TIMEOUT = 15.0
"""Seconds after which a stop that hangs is cut short."""


def run_server(
    options: ServerOptions,
    make_stage: StageFactory,
    on_listening: Callable[[int], None],
    on_start: Callable[[Callable[[], None]], None] = lambda stop: None,
) -> int:
    """Serve from the main thread until SIGTERM, SIGINT or ``stop``; a second signal exits at once.

    Args:
        options: How to serve.
        make_stage: Builds stages.
        on_listening: Called once with the port.
        on_start: Called once with a function that stops the daemon from any thread.
    """
    torch.set_num_threads(options.threads)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        stopped = asyncio.Event()
        stopping = threading.Event()

        def stop() -> None:
            if not stopping.is_set():
                stopping.set()
                # Whatever a stage's thread does, the process ends.
                watchdog = threading.Timer(STOP_TIMEOUT, os._exit, (1,))
                watchdog.daemon = True
                watchdog.start()
            # The loop may have ended by itself.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(stopped.set)

        def on_signal(number: int) -> None:
            if stopping.is_set():
                os._exit(128 + number)
            stop()

        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            for number in before:
                try:
                    # Wakes the loop whichever thread the signal is delivered to; signal.signal alone does not.
                    loop.add_signal_handler(number, on_signal, number)
                except NotImplementedError:
                    signal.signal(number, lambda number, frame: on_signal(number))
            on_start(stop)
            await serve(options, make_stage, on_listening=on_listening, stop=stopped, tidy=settle)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    asyncio.run(main())
    return 0
