"""The command line: ``lightning-accept COMMAND``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import PositiveFloat, PositiveInt, restricted_number_type

from lightning_accept.version import __version__

_Port = restricted_number_type("Port", int, [(">=", 0), ("<=", 65535)])

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_UNITS.update({"KB": 10**3, "MB": 10**6, "GB": 10**9})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` (by default the process's) name, and return the exit code."""
    parser = ArgumentParser(
        prog="lightning-accept",
        description="Train one LightningModule across several devices.",
        version=__version__,
    )
    commands = parser.add_subcommands(required=True, dest="command")
    for name, (make_parser, _) in _COMMANDS.items():
        commands.add_subcommand(name, make_parser())
    chosen = parser.parse_args(arguments)
    _, run = _COMMANDS[chosen.command]
    return run(chosen[chosen.command])


def parse_size(text: str | int) -> int:
    """A number of bytes from ``2GiB``, ``500MB``, ``65536`` and the like.

    Raises:
        ValueError: If it is none.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    unit = match and _UNITS.get(match[2].upper())
    if not match or not unit:
        raise ValueError(f"{text!r} is not a size; write it like 2GiB, 500MB or 65536")
    return int(float(match[1]) * unit)


def _worker_parser() -> ArgumentParser:
    parser = ArgumentParser(description="Serve as a worker: hold one stage of whatever run claims this device.")
    add = parser.add_argument
    add("--host", type=str, default="0.0.0.0", help="address to listen on")
    add("--port", type=_Port, default=7070, help="port to listen on; 0 for a free one")
    add(
        "--token-file",
        type=str | None,
        default=None,
        help="file with the token that central nodes must know (also: environment variable LIGHTNING_ACCEPT_TOKEN;"
        " without either, a token is made and printed)",
    )
    add("--threads", type=PositiveInt | None, default=None, help="threads to compute with; by default one per core")
    add("--device", type=str, default="auto", help="cpu, cuda:0, ... or auto")
    add("--max-body", type=str, default="2GiB", help="largest message, for example 500MB or 2GiB")
    add("--lease", type=PositiveFloat, default=60.0, help="seconds without the central node until a run is released")
    add("--certfile", type=str | None, default=None, help="certificate chain (PEM) to serve HTTPS")
    add("--keyfile", type=str | None, default=None, help="key of the certificate, if it is not in the same file")
    add("--cafile", type=str | None, default=None, help="certificates against which other workers' are checked")
    add(
        "--allow-optimizer",
        type=str,
        action="append",
        default=[],
        help="dotted name of an optimizer class outside torch.optim that runs may use here; may be repeated",
    )
    return parser


def _run_worker(options: Namespace) -> int:
    # Imports torch, which the other commands and --help need not wait for.
    from lightning_accept.remote.worker import WorkerOptions, run_worker

    values: dict[str, Any] = options.as_dict()
    try:
        values["max_body"] = parse_size(values["max_body"])
    except ValueError as error:
        print(f"lightning-accept worker: --max-body: {error}", file=sys.stderr)
        return 2
    return run_worker(WorkerOptions(**values))


_COMMANDS: dict[str, tuple[Callable[[], ArgumentParser], Callable[[Namespace], int]]] = {
    "worker": (_worker_parser, _run_worker),
}


if __name__ == "__main__":
    sys.exit(main())
