"""The worker daemon as a process: from its options to its exit code."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_accept.latency.cores import usable_cores
from lightning_accept.pipeline.runner import build_stage
from lightning_accept.remote.facts import choose_device, reachable_addresses, url
from lightning_accept.remote.optimizers import import_optimizers
from lightning_accept.remote.process import run_server
from lightning_accept.remote.server import CannotListen, ServerOptions
from lightning_accept.remote.tenancy import StageFactory
from lightning_accept.remote.tls import server_context
from lightning_accept.remote.tokens import TOKEN_VARIABLE, check_token, new_token, read_token, readable_by_all
from lightning_accept.version import __version__


@dataclass(frozen=True)
class WorkerOptions:
    """What ``lightning-accept worker`` is given.

    Attributes:
        host: Address to listen on.
        port: Port to listen on; 0 for a free one.
        token_file: File with the token; None to take it from the environment or to make one.
        threads: Threads to compute with; None for all cores.
        device: ``cpu``, ``cuda:0``, ... or ``auto``.
        max_body: Largest request body in bytes.
        lease: Seconds of the central node's silence after which a run is released.
        certfile: Certificate chain (PEM) to serve HTTPS.
        keyfile: The certificate's key.
        cafile: Certificates against which neighbours' are checked.
        allow_optimizer: Dotted names of optimizer classes beyond ``torch.optim``.
    """

    host: str = "0.0.0.0"
    port: int = 7070
    token_file: str | None = None
    threads: int | None = None
    device: str = "auto"
    max_body: int = 2 * 2**30
    lease: float = 60.0
    certfile: str | None = None
    keyfile: str | None = None
    cafile: str | None = None
    allow_optimizer: Sequence[str] = ()


def run_worker(options: WorkerOptions) -> int:
    """Serve until a signal ends it; returns the process's exit code (0, or 2 if the options do not work here)."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    try:
        token, made = _token(options.token_file)
        if options.cafile is not None and not os.path.isfile(options.cafile):
            raise ValueError(f"--cafile {options.cafile!r} is not a file")
        server = ServerOptions(
            token=token,
            host=options.host,
            port=options.port,
            device=choose_device(options.device),
            threads=options.threads or usable_cores(),
            max_body=options.max_body,
            lease=options.lease,
            tls=server_context(options.certfile, options.keyfile),
            cafile=options.cafile,
        )
        make_stage = stage_factory(options.allow_optimizer)
        return run_server(server, make_stage, lambda port: _announce(server, port, token if made else None))
    except (ValueError, CannotListen) as error:
        print(f"lightning-accept worker: {error}", file=sys.stderr)
        return 2


def stage_factory(allow_optimizer: Sequence[str]) -> StageFactory:
    """Builds stages that may use the optimizers of ``torch.optim`` and those called ``allow_optimizer``."""
    return functools.partial(build_stage, allowed_optimizers=import_optimizers(allow_optimizer))


def _token(path: str | None) -> tuple[str, bool]:
    """The token, and whether it was made here."""
    if path is not None:
        token = read_token(path)
        if readable_by_all(path):
            print(f"warning: every user of this machine can read the token file; chmod 600 {path}", file=sys.stderr)
        return token, False
    if TOKEN_VARIABLE in os.environ:
        return check_token(os.environ[TOKEN_VARIABLE].strip(), f"the environment variable {TOKEN_VARIABLE}"), False
    return new_token(), True


def _announce(options: ServerOptions, port: int, new: str | None) -> None:
    tls = options.tls is not None
    first, *others = [url(address, port, tls=tls) for address in reachable_addresses(options.host)]
    lines = [
        f"lightning-accept {__version__} worker, device {options.device}, {options.threads} threads",
        f"give this address to the central node: {first}",
    ]
    if others:
        lines.append(f"also listening on: {' '.join(others)}")
    if new is not None:
        lines.append(f"token (made for this start, shown only now; --token-file sets your own): {new}")
    print("\n".join(lines), flush=True)
