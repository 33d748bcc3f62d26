"""The process of an embedded worker: told everything on standard input, and gone when that closes."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from lightning_accept.remote.facts import choose_device, url
from lightning_accept.remote.process import run_server
from lightning_accept.remote.server import ServerOptions
from lightning_accept.remote.worker import stage_factory

_PARENT_INTERVAL = 1.0


def main(config: dict[str, Any]) -> int:
    """Serve on a free port of the loopback interface until standard input ends or the parent is gone.

    Args:
        config: ``token``, ``threads``, ``device``, ``lease`` and ``allow_optimizer``, as
            :class:`~lightning_accept.remote.local.LocalWorkers` writes them.

    The first line on standard output is a JSON object with the ``url``; nothing follows it.
    """
    options = ServerOptions(
        token=config["token"],
        threads=config["threads"],
        device=choose_device(config["device"]),
        lease=config["lease"],
    )

    def announce(port: int) -> None:
        print(json.dumps({"url": url(options.host, port, tls=False)}), flush=True)
        # Nobody reads on, so that whatever is still printed must not fill the pipe.
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    return run_server(options, stage_factory(config["allow_optimizer"]), announce, _stop_with_parent)


def _stop_with_parent(stop: Callable[[], None]) -> None:
    parent = os.getppid()
    orphaned = threading.Event()

    def watch_input() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        orphaned.set()

    def watch_parent() -> None:
        # A process forked by the parent may hold the pipe open after the parent's death.
        while not orphaned.wait(_PARENT_INTERVAL):
            if os.name == "posix" and os.getppid() != parent:
                break
        stop()

    for watch in (watch_input, watch_parent):
        threading.Thread(target=watch, name=watch.__name__, daemon=True).start()
