"""One side of a conversation with a worker: authenticated requests, retried until a deadline."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
import urllib3

from lightning_accept.pipeline.messages import (
    PipelineError,
    SourceUnreachable,
    StageFault,
    Transfer,
    TransportError,
    WrongTerm,
)
from lightning_accept.remote.frames import new_buffer
from lightning_accept.remote.interrupt import Interrupter, Upload, new_session
from lightning_accept.remote.tokens import check_token
from lightning_accept.remote.window import Window
from lightning_accept.remote.wire import WireError, fault_from_json

_CONNECT_TIMEOUT = 5.0
_REPLY_TIMEOUT = 30.0
"""Seconds beyond what was asked for after which a reply counts as lost."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_LARGEST_ERROR = 2**20
_BLOCK = 256 * 1024
_FIRST_BLOCK = 8 * 1024

Query = Mapping[str, str]


@dataclass(frozen=True)
class Reply:
    """A worker's answer, read to its end.

    Attributes:
        status: The HTTP status.
        headers: The headers.
        body: The body.
        seconds: From the request's first byte to the reply's last, without earlier attempts.
        transfer: The passing of the body but for its beginning, which the connection's buffers may have held back.
    """

    status: int
    headers: Mapping[str, str]
    body: memoryview
    seconds: float
    transfer: Transfer

    def json(self) -> dict[str, Any]:
        """The body as a JSON object; WireError if it is not one."""
        try:
            content = json.loads(bytes(self.body))
        except (ValueError, RecursionError) as error:
            raise WireError("the reply is not JSON") from error
        if not isinstance(content, dict):
            raise WireError("the reply is not a JSON object")
        return content


def check_url(url: str) -> str:
    """``url`` without a trailing slash.

    Raises:
        ValueError: If it is not the URL of a worker.
    """
    parts = urlsplit(url)
    try:
        well_formed = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        well_formed = False
    if not well_formed or parts.username or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is not the URL of a worker; it looks like http://192.168.1.20:7070")
    return url.rstrip("/")


class Peer:
    """Requests to one worker over connections of their own; used by one thread at a time.

    Args:
        url: The worker's URL.
        token: The bearer token.
        timeout: Seconds for which lost requests are repeated.
        cafile: Certificates against which the worker's is checked; None for the system's.
        interrupter: Ends calls in progress.
        window: What replies may have under way; None not to limit them.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        timeout: float,
        cafile: str | None,
        interrupter: Interrupter,
        window: Window | None = None,
    ) -> None:
        if cafile is not None and not Path(cafile).is_file():
            raise ValueError(f"cafile={cafile!r} is not a file")
        self.url = check_url(url)
        self._timeout = timeout
        self._interrupter = interrupter
        self._session = new_session(interrupter, window or Window())
        self._session.headers["Authorization"] = f"Bearer {check_token(token, 'token=...')}"
        self._verify: bool | str = True if cafile is None else cafile

    def request(
        self,
        method: str,
        path: str,
        what: str,
        *,
        query: Query | None = None,
        body: bytes = b"",
        wait: float = 0.0,
        timeout: float | None = None,
        on_left: Callable[[], None] | None = None,
        on_head: Callable[[int, int | None], None] | None = None,
    ) -> Reply:
        """Send a request that may safely arrive twice, and return the successful reply.

        Args:
            method: The HTTP method.
            path: The path.
            what: What is to be sent or asked for, for messages.
            query: The query.
            body: The body.
            wait: Seconds that the worker is asked to wait before it replies.
            timeout: Overrides the peer's own.
            on_left: Called, at every attempt, when the whole body has been handed to the network.
            on_head: Called, at every attempt, with the reply's status and declared length before its body is read.

        Raises:
            TransportError: If no reply came within the deadline, the run has lost the worker, or this peer was closed.
            StageFault: If the stage has failed.
            WrongTerm: If the worker serves another term.
            PipelineError: If the worker refuses; the message holds the cure.
        """
        limit = self._timeout if timeout is None else timeout
        reply_timeout = min(_REPLY_TIMEOUT, max(1.0, limit))
        deadline: float | None = None
        pause = _FIRST_PAUSE
        while True:
            if self._interrupter.interrupted:
                self.close()
                raise TransportError(f"{what}: the connection to {self.url} was closed from this side")
            retry_after, problem, waited = None, "", 0.0
            try:
                reply = self._attempt(method, path, query, body, wait + reply_timeout, on_left, on_head)
            except requests.exceptions.SSLError as error:
                if self._interrupter.interrupted:
                    continue
                if not _is_interruption(error):
                    raise TransportError(self._tls_advice(what, error)) from error
                problem = _reason(error)
            except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
                if self._interrupter.interrupted:
                    continue
                problem = _reason(error)
                if isinstance(error, (requests.exceptions.ReadTimeout, urllib3.exceptions.ReadTimeoutError)):
                    waited = reply_timeout
            else:
                if reply.status < 300:
                    return reply
                refusal = self._refusal(reply, what)
                if reply.status not in (408, 503):
                    raise refusal
                problem = str(refusal)
                retry_after = _retry_after(reply)
            delay = pause if retry_after is None else retry_after
            now = time.monotonic()
            if deadline is None:
                # Counted from the first loss: what came before was a transfer, or a wait that was asked for.
                deadline = now + limit - waited
            if now + delay > deadline:
                raise TransportError(self._lost(what, limit, problem, retry_after is not None))
            pause = min(2 * pause, _LONGEST_PAUSE) if retry_after is None else _FIRST_PAUSE
            self._interrupter.wait(delay)

    def close(self) -> None:
        """Close the connections that are not in use."""
        self._session.close()

    def _attempt(
        self,
        method: str,
        path: str,
        query: Query | None,
        body: bytes,
        read_timeout: float,
        on_left: Callable[[], None] | None,
        on_head: Callable[[int, int | None], None] | None,
    ) -> Reply:
        started = time.perf_counter()
        with self._session.request(
            method,
            self.url + path,
            params=query,
            data=Upload(body, on_left) if body else None,  # type: ignore[arg-type]
            timeout=(_CONNECT_TIMEOUT, read_timeout),
            verify=self._verify,
            allow_redirects=False,
            stream=True,
        ) as response:
            if on_head is not None:
                length = response.headers.get("Content-Length", "")
                on_head(response.status_code, int(length) if length.isdigit() else None)
            content, transfer = _read(response)
            return Reply(response.status_code, response.headers, content, time.perf_counter() - started, transfer)

    def _refusal(self, reply: Reply, what: str) -> PipelineError:
        try:
            content = reply.json()
            message, code = content["error"], content["code"]
        except (WireError, KeyError):
            return PipelineError(
                f"{what}: {self.url} answered with HTTP status {reply.status}, not as a worker does;"
                " check that the URL is that of a lightning-accept worker"
            )
        if code == "token":
            return PipelineError(
                f"worker {self.url} refused {what}: {message}; check token=..., it must be what the worker was started"
                " with (--token-file) or has printed"
            )
        if code == "fault":
            try:
                return StageFault(fault_from_json(content.get("fault")))
            except WireError as error:
                return PipelineError(f"worker {self.url} reports a fault that cannot be read: {error}")
        if code == "term":
            return WrongTerm(f"worker {self.url} refused {what}: {message}")
        if code == "source" and isinstance(content.get("source"), str):
            return SourceUnreachable(message, content["source"])
        if code == "run":
            return TransportError(f"worker {self.url} is lost to this run, {what} failed: {message}")
        if code == "timeout":
            return TransportError(f"worker {self.url}, {what}: {message}")
        if code == "busy":
            return PipelineError(
                f"worker {self.url} is busy: held by {content.get('holder')} (run {content.get('run')}) since"
                f" {content.get('since')}; wait until it is free or use another worker"
            )
        return PipelineError(f"worker {self.url} refused {what}: {message}")

    def _tls_advice(self, what: str, error: Exception) -> str:
        reason = _reason(error)
        if "WRONG_VERSION_NUMBER" in reason or "RECORD_LAYER" in reason or "record layer" in reason:
            return f"no TLS connection to {self.url} for {what}: {reason}; if it serves plain HTTP, address it with http://"
        return (
            f"no TLS connection to {self.url} for {what}: {reason}; name the file with the worker's certificate"
            " or its authority in cafile=..., and use the name or address that the certificate is made out to"
        )

    def _lost(self, what: str, seconds: float, problem: str, full: bool) -> str:
        if full:
            return f"worker {self.url} did not take {what} within {seconds:g} s: {problem}"
        port = urlsplit(self.url).port
        return (
            f"worker {self.url} could not be reached for {what} within {seconds:g} s: {problem}; if it is not running,"
            f" start it there with: lightning-accept worker{'' if port is None else f' --port {port}'}"
        )


def _read(response: requests.Response) -> tuple[memoryview, Transfer]:
    length = response.headers.get("Content-Length")
    if response.status_code >= 300 or length is None or not length.isdigit():
        # Errors are short; whatever is not ours is not read to its end.
        return memoryview(response.raw.read(_LARGEST_ERROR)), Transfer(0, 0.0)
    buffer = new_buffer(int(length))
    if not buffer:
        response.raw.read()  # otherwise the connection is not kept
    filled, timed, started = 0, 0, time.perf_counter()
    while filled < len(buffer):
        block = response.raw.read(min(_BLOCK if timed else _FIRST_BLOCK, len(buffer) - filled))
        if not block:
            raise requests.exceptions.ConnectionError(f"the reply ended after {filled} of {length} bytes")
        buffer[filled : filled + len(block)] = block
        filled += len(block)
        if not timed:
            timed, started = filled, time.perf_counter()
    return buffer, Transfer(filled - timed, time.perf_counter() - started)


def _retry_after(reply: Reply) -> float | None:
    if reply.status != 503:
        return None
    try:
        seconds = float(reply.json().get("retry_after", reply.headers.get("Retry-After", "1")))
    except (WireError, TypeError, ValueError):
        return 1.0
    return min(max(seconds, 0.01), 30.0) if math.isfinite(seconds) else 1.0


def _is_interruption(error: Exception) -> bool:
    """Whether TLS failed because the connection broke, which may pass, rather than over a certificate."""
    text = str(error)
    return "EOF" in text or "timed out" in text


def _reason(error: BaseException) -> str:
    """The innermost cause in one line; requests wraps it several times."""
    current: Any = error
    while True:
        inner = getattr(current, "reason", None)
        if not isinstance(inner, BaseException):
            inner = next((part for part in getattr(current, "args", ()) if isinstance(part, BaseException)), None)
        if inner is None:
            break
        current = inner
    if isinstance(current, (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError)):
        # Their text begins with the connection object's representation.
        return str(current.args[0]).split(": ", 1)[-1]
    return str(current) or type(current).__name__
