"""``lightning-accept status``: what workers are doing, and for whom."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from lightning_accept.commands.text_table import aligned, size
from lightning_accept.pipeline.messages import PipelineError
from lightning_accept.remote.interrupt import Interrupter
from lightning_accept.remote.peer import Peer
from lightning_accept.remote.tokens import TOKEN_VARIABLE, check_token, read_token
from lightning_accept.remote.wire import WireError

_HEAD = ("worker", "version", "device", "threads", "memory free", "run", "stage", "layers", "busy", "queued")


@dataclass(frozen=True)
class StatusOptions:
    """What ``lightning-accept status`` is given.

    Attributes:
        urls: The workers' URLs.
        token_file: File with their token; None to take it from the environment.
        cafile: Certificates against which theirs are checked.
        timeout: Seconds within which a worker must answer.
        json: Whether to print JSON.
    """

    urls: Sequence[str]
    token_file: str | None
    cafile: str | None
    timeout: float
    json: bool


def run_status(options: StatusOptions) -> int:
    """Print a table; returns the process's exit code: 0, 1 if a worker does not answer, 2 if the options are wrong."""
    try:
        token = _token(options.token_file)
        peers = [
            Peer(url, token, timeout=options.timeout, cafile=options.cafile, interrupter=Interrupter())
            for url in options.urls
        ]
    except (OSError, ValueError) as error:
        print(f"lightning-accept status: {error}", file=sys.stderr)
        return 2
    with ThreadPoolExecutor(len(peers)) as pool:
        answers = list(pool.map(_ask, peers))
    if options.json:
        print(json.dumps(dict(zip(options.urls, answers, strict=True)), indent=2))
    else:
        print("\n".join(aligned([_HEAD, *(_row(url, one) for url, one in zip(options.urls, answers, strict=True))])))
        for answer in answers:
            if "error" in answer:
                print(answer["error"], file=sys.stderr)
    return 1 if any("error" in answer for answer in answers) else 0


def _token(path: str | None) -> str:
    if path is not None:
        return read_token(path)
    return check_token(os.environ.get(TOKEN_VARIABLE, "").strip(), f"the environment variable {TOKEN_VARIABLE}")


def _ask(peer: Peer) -> dict[str, Any]:
    """What one worker says of itself, or why it does not."""
    try:
        return peer.request("GET", "/status", "the status").json()
    except (PipelineError, WireError) as error:
        return {"error": str(error)}
    finally:
        peer.close()


def _row(url: str, answer: dict[str, Any]) -> tuple[str, ...]:
    if "error" in answer:
        return (url, "no answer", *[""] * (len(_HEAD) - 2))
    facts, holder, stats = answer["facts"], answer["holder"], answer["stats"] or {}
    free = facts.get("memory_free")
    cells = [
        url,
        str(facts["version"]),
        str(facts["device"]),
        str(facts["threads"]),
        "" if free is None else size(free),
    ]
    cells.append("free" if holder is None else f"{holder['holder']} since {holder['since']}")
    layers = stats.get("layers", [])
    cells.append(str(stats.get("stage", "")))
    cells.append(layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}" if layers else "")
    cells += [_busy(stats), str(stats.get("queued", ""))]
    return tuple(cells)


def _busy(stats: dict[str, Any]) -> str:
    """Share of the time since the deployment in which the stage has computed."""
    computed = stats.get("forward_seconds", 0.0) + stats.get("backward_seconds", 0.0)
    total = computed + stats.get("waiting_seconds", 0.0)
    return f"{100 * computed / total:.0f} %" if total > 0 else ""
