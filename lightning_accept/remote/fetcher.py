"""Fetches what a worker addresses to the central node, the next item asked for while one is still coming in."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from lightning_accept.pipeline.messages import Direction
from lightning_accept.remote.packet_sender import run_path
from lightning_accept.remote.peer import Peer, Reply
from lightning_accept.remote.window import Window

_CONNECTIONS = 2
_WAIT_AHEAD = 1.0
"""Seconds for which an item asked for ahead is waited for at the worker."""
_LARGEST_AHEAD = 16 * 2**20
"""Bytes of an item above which the next one is not asked for ahead: the worker's outbox may have no room for both."""


class _Item(NamedTuple):
    run: str
    term: int
    after: int


class Fetcher:
    """Asks for the items of one outbox, over two connections.

    Where each were asked for only when the one before is there, the link would be idle for a round trip, and for as
    long as the request waits behind what travels to the worker.

    Args:
        make_peer: Makes what asks over one connection at a time.
        direction: Which outbox.
        window: Told how fast that is.
    """

    def __init__(self, make_peer: Callable[[], Peer], direction: Direction, window: Window) -> None:
        self._window = window
        self._direction = direction
        self._peers = [make_peer() for _ in range(_CONNECTIONS)]
        self._idle: queue.LifoQueue[Peer] = queue.LifoQueue()
        for peer in self._peers:
            self._idle.put(peer)
        self._lock = threading.Lock()
        self._asked: dict[_Item, Future[Reply]] = {}
        self._received = 0

    def fetch(self, run: str, term: int, after: int, wait: float) -> Reply:
        """The reply with the item after number ``after``, all up to which were received. One caller at a time.

        Args:
            run: The run.
            term: The term.
            after: Number of the last item received; 0 before the first.
            wait: Seconds for which the worker may wait for the item before it replies without one (status 204).

        Raises:
            PipelineError: As :meth:`Peer.request`.
        """
        item = _Item(run, term, after)
        with self._lock:
            self._received = after
            asked = self._asked.pop(item, None)
            for other in [other for other in self._asked if other[:2] != item[:2] or other.after < after]:
                del self._asked[other]
        # The peer has a deadline.
        return (self._ask(item, wait) if asked is None else asked).result()

    def close(self) -> None:
        """As :meth:`Peer.close`."""
        for peer in self._peers:
            peer.close()

    def _ask(self, item: _Item, wait: float) -> Future[Reply]:
        future: Future[Reply] = Future()
        threading.Thread(target=self._request, args=(future, item, wait), name="fetch", daemon=True).start()
        return future

    def _request(self, future: Future[Reply], item: _Item, wait: float) -> None:
        def on_head(status: int, length: int | None) -> None:
            if status == 200 and length is not None and length <= _LARGEST_AHEAD:
                self._ask_ahead(item._replace(after=item.after + 1))

        peer = self._idle.get()
        try:
            query = {
                "term": str(item.term),
                "after": str(item.after),
                "received": str(min(self._received, item.after)),
                "wait": f"{wait:.3f}",
            }
            what = f"the packets that go {self._direction}"
            path = f"{run_path(item.run)}/outbox/{self._direction}"
            reply = peer.request("GET", path, what, query=query, wait=wait, on_head=on_head)
            self._window.passed(reply.transfer.nbytes, reply.transfer.seconds)
            future.set_result(reply)
        except BaseException as error:
            future.set_exception(error)
        finally:
            self._idle.put(peer)

    def _ask_ahead(self, item: _Item) -> None:
        with self._lock:
            if item not in self._asked:
                self._asked[item] = self._ask(item, _WAIT_AHEAD)
