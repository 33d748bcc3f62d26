"""The command line: ``lightning-accept COMMAND``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt, restricted_number_type

from lightning_accept.version import __version__

_Port = restricted_number_type("Port", int, [(">=", 0), ("<=", 65535)])

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_UNITS.update({"KB": 10**3, "MB": 10**6, "GB": 10**9})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` (by default the process's) name, and return the exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments and arguments[0] in _TRAINER_COMMANDS:
        # Imports Lightning and torch, which the other commands and --help need not wait for.
        from lightning_accept.commands.trainer import run_trainer

        return run_trainer(arguments)
    parser = ArgumentParser(
        prog="lightning-accept",
        description="Train one LightningModule across several devices.",
        version=__version__,
    )
    commands = parser.add_subcommands(required=True, dest="command")
    for name, text in _TRAINER_COMMANDS.items():
        commands.add_subcommand(name, ArgumentParser(description=text), help=text)
    for name, (make_parser, _) in _COMMANDS.items():
        command = make_parser()
        commands.add_subcommand(name, command, help=command.description)
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


def _plan_parser() -> ArgumentParser:
    parser = ArgumentParser(description="Print the best partition for given devices and links, and what to expect.")
    add = parser.add_argument
    add("data", type=str, nargs="+", help="data of lightning-accept profile; more files: smaller batch sizes")
    add("--devices", type=str, nargs="+", required=True, help="names in the data, in the chain's order, central first")
    add(
        "--links",
        type=str,
        nargs="+",
        default=["unlimited"],
        help="one for all or one per hop, the last one from the last worker to the central node: 10Mbit,"
        " 10Mbit:1Mbit@5ms (there, back, delay) or unlimited; a device's links share its way into the network, which is"
        " as fast as the fastest of them",
    )
    add("--latency", type=str, default="table", help="table, measured, capacity or a predictor file")
    add("--forward-codec", type=str, default="auto", help="codec for activations")
    add("--backward-codec", type=str, default="auto", help="codec for gradients")
    add("--in-flight", type=PositiveInt | None, default=None, help="batches in flight; by default the plan chooses")
    add("--leave-out", action="store_true", help="leave out devices that would slow the chain")
    add("--memory", type=str, nargs="*", default=[], help="memory of each device, or one for all, such as 1GiB")
    add("--state-copies", type=float, default=1.0, help="optimizer state per parameter: 1 for momentum, 2 for Adam")
    add("--json", action="store_true", help="print JSON")
    return parser


def _run_plan(options: Namespace) -> int:
    from lightning_accept.commands.plan import PlanOptions, run_plan

    values: dict[str, Any] = options.as_dict()
    try:
        values["memory"] = [parse_size(text) for text in values["memory"]]
    except ValueError as error:
        print(f"lightning-accept plan: --memory: {error}", file=sys.stderr)
        return 2
    return run_plan(PlanOptions(**values))


_TRAINER_COMMANDS = {
    "fit": "Train a model: --config FILE or LightningCLI's options.",
    "validate": "Evaluate a model on its validation data, likewise.",
    "test": "Evaluate a model on its test data, likewise.",
    "predict": "Predict with a model, likewise.",
}
"""LightningCLI's commands, which parse their own arguments."""


def _profile_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="Measure every run of a model's layers, under many conditions of this machine and on workers."
        " An interrupted collection goes on where it was."
    )
    add = parser.add_argument
    add("module", type=str, help="class of the module, or function that makes it: package.module.Name")
    add("--args", type=str | None, default=None, help="its arguments: a JSON list or object")
    add("--submodule", type=str | None, default=None, help="what of it is pipelined, as AccEPTStrategy(module=...)")
    add(
        "--input",
        type=str,
        nargs="+",
        default=[],
        help="shape of each input, such as 128,3,32,32 or 128,20:int64; by default the module's example_input_array",
    )
    add("--workers", type=str, nargs="+", default=[], help="URLs of workers to measure on as well")
    add("--token-file", type=str | None, default=None, help="file with their token (or LIGHTNING_ACCEPT_TOKEN)")
    add("--cafile", type=str | None, default=None, help="certificates against which the workers' are checked")
    add("--threads", type=PositiveInt, nargs="+", default=[1], help="numbers of threads for each local condition")
    add("--conditions", type=str, nargs="+", default=["all"], help="local conditions by name, or all, or none")
    add("--seconds", type=PositiveFloat, default=120.0, help="time for each local condition")
    add("--repeat-seconds", type=PositiveFloat, default=0.5, help="time for each run of layers on a worker")
    add("--timeout", type=PositiveFloat, default=1800.0, help="seconds that a worker may take for 16 runs of layers")
    add("--name", type=str | None, default=None, help="what to call the model; by default its class")
    add("--machine", type=str | None, default=None, help="name of this machine, where data of several is to be merged")
    add("--out", type=str, required=True, help="file of the data")
    return parser


def _run_profile(options: Namespace) -> int:
    from lightning_accept.commands.profile import ProfileOptions, run_profile_command

    return run_profile_command(ProfileOptions(**options.as_dict()))


def _pretrain_parser() -> ArgumentParser:
    parser = ArgumentParser(description="Make a latency predictor from the data of many device configurations.")
    add = parser.add_argument
    add("data", type=str, nargs="+", help="data of lightning-accept profile, all of the same model and batch size")
    add("--out", type=str, required=True, help="file of the predictor (safetensors)")
    add("--steps", type=NonNegativeInt | None, default=None, help="steps of training; 0 for no network")
    add("--seed", type=int, default=0, help="of everything random")
    return parser


def _run_pretrain(options: Namespace) -> int:
    from lightning_accept.commands.pretrain import PretrainOptions, run_pretrain

    return run_pretrain(PretrainOptions(**options.as_dict()))


def _status_parser() -> ArgumentParser:
    parser = ArgumentParser(description="Print what workers are doing: runs, stages, load, versions.")
    add = parser.add_argument
    add("urls", type=str, nargs="+", help="URLs of workers")
    add("--token-file", type=str | None, default=None, help="file with the workers' token")
    add("--cafile", type=str | None, default=None, help="certificates against which the workers' are checked")
    add("--timeout", type=PositiveFloat, default=5.0, help="seconds within which a worker must answer")
    add("--json", action="store_true", help="print JSON")
    return parser


def _run_status(options: Namespace) -> int:
    from lightning_accept.commands.status import StatusOptions, run_status

    return run_status(StatusOptions(**options.as_dict()))


_COMMANDS: dict[str, tuple[Callable[[], ArgumentParser], Callable[[Namespace], int]]] = {
    "plan": (_plan_parser, _run_plan),
    "pretrain": (_pretrain_parser, _run_pretrain),
    "profile": (_profile_parser, _run_profile),
    "status": (_status_parser, _run_status),
    "worker": (_worker_parser, _run_worker),
}


if __name__ == "__main__":
    sys.exit(main())
