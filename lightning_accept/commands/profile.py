"""``lightning-accept profile``: measure a model's sub-models on this machine and on workers."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_accept.commands.remote_profile import profile_worker
from lightning_accept.commands.user_module import UserModuleError, build_module, choose_part, make_input
from lightning_accept.graph import Chain, Trace, TraceError, trace
from lightning_accept.latency.collect import CollectError, collect
from lightning_accept.latency.conditions import Condition, choose_conditions
from lightning_accept.latency.dataset import Configuration, Dataset
from lightning_accept.latency.model_facts import ModelFacts
from lightning_accept.latency.request import ProfileRequest
from lightning_accept.latency.submodels import all_spans
from lightning_accept.pipeline.messages import PipelineError
from lightning_accept.pipeline.transport import WorkerHandle
from lightning_accept.progress import Activity, ProgressLine
from lightning_accept.remote.client import HttpWorker
from lightning_accept.remote.tokens import TOKEN_VARIABLE, check_token, read_token

NONE, ALL = "none", "all"


@dataclass(frozen=True)
class ProfileOptions:
    """What ``lightning-accept profile`` is given.

    Attributes:
        module: Dotted path of a module's class or of a function that makes one.
        args: Its arguments as JSON, or None.
        submodule: What of it is pipelined, or None for the default.
        input: Shapes of the input; empty for the module's example.
        workers: URLs of workers to measure on.
        token_file: File with their token; None to take it from the environment.
        cafile: Certificates against which theirs are checked.
        threads: Numbers of threads for each local condition.
        conditions: Names of local conditions, ``all`` or ``none``.
        seconds: Time per local condition.
        repeat_seconds: Time per sub-model on a worker.
        timeout: Seconds that a worker may take for a few sub-models.
        name: What to call the model; None for its class's name.
        machine: Put before the names of local configurations; None for nothing.
        out: The data set's file.
    """

    module: str
    args: str | None
    submodule: str | None
    input: Sequence[str]
    workers: Sequence[str]
    token_file: str | None
    cafile: str | None
    threads: Sequence[int]
    conditions: Sequence[str]
    seconds: float
    repeat_seconds: float
    timeout: float
    name: str | None
    machine: str | None
    out: str


def run_profile_command(
    options: ProfileOptions,
    connect: Callable[[str, str, str | None], WorkerHandle] = lambda url, token, cafile: HttpWorker(
        url, token, cafile=cafile
    ),
) -> int:
    """Collect a data set; returns the process's exit code.

    0, or 1 if something could not be measured, or 2 if the options do not work here.

    Args:
        options: What to do.
        connect: Makes the handle of a worker from URL, token and cafile.
    """
    try:
        conditions = _conditions(options)
        workers = _workers(options, connect)
        if not conditions and not workers:
            raise ValueError("there is nothing to measure on: --conditions none and no --workers")
        name, traced = _trace(options)
    except (UserModuleError, TraceError, ValueError) as error:
        print(f"lightning-accept profile: {error}", file=sys.stderr)
        return 2
    with ProgressLine().show("profiling", len(conditions) + len(workers)) as shown:
        try:
            failures = _local(options, name, traced, conditions, shown)
            failures += _remote(options, name, traced, workers, shown)
        except (OSError, ValueError) as error:
            print(f"lightning-accept profile: {error}", file=sys.stderr)
            return 2
    if Path(options.out).exists():
        data = Dataset.load(options.out)
        print(
            f"{options.out}: {data.model.name}, batch {data.model.batch}, {len(data.model.layers)} layers,"
            f" {len(data.configurations)} device configurations"
        )
    return 1 if failures else 0


def _conditions(options: ProfileOptions) -> list[Condition]:
    if list(options.conditions) == [NONE]:
        return []
    names = None if list(options.conditions) == [ALL] else options.conditions
    available = []
    for condition in choose_conditions(names, options.threads):
        reason = condition.unavailable()
        if reason is None:
            available.append(condition)
        else:
            print(f"left out {condition.name!r}: {reason}", file=sys.stderr)
    return available


def _workers(options: ProfileOptions, connect: Callable[[str, str, str | None], WorkerHandle]) -> list[WorkerHandle]:
    if not options.workers:
        return []
    if options.token_file is not None:
        token = read_token(options.token_file)
    elif TOKEN_VARIABLE in os.environ:
        token = check_token(os.environ[TOKEN_VARIABLE].strip(), f"the environment variable {TOKEN_VARIABLE}")
    else:
        raise ValueError(f"give the workers' token with --token-file or the environment variable {TOKEN_VARIABLE}")
    return [connect(url, token, options.cafile) for url in dict.fromkeys(options.workers)]


def _trace(options: ProfileOptions) -> tuple[str, Trace]:
    module = build_module(options.module, options.args)
    args, kwargs = make_input(module, options.input)
    part = choose_part(module, options.submodule)
    return options.name or type(module).__name__, trace(part, args, kwargs)


def _local(options: ProfileOptions, name: str, traced: Trace, conditions: Sequence[Condition], shown: Activity) -> int:
    failures = 0
    for condition in conditions:
        shown.begin(condition.name)
        try:
            collect(
                traced,
                name,
                [condition],
                options.out,
                seconds=options.seconds,
                machine=options.machine,
                on_progress=lambda condition, share: shown.update(share),
            )
        except CollectError as error:
            shown.say(f"lightning-accept profile: {error}")
            failures += 1
        shown.update(1.0)
    return failures


def _remote(options: ProfileOptions, name: str, traced: Trace, workers: Sequence[WorkerHandle], shown: Activity) -> int:
    if not workers:
        return 0
    chain = Chain.from_trace(traced)
    request = ProfileRequest.of(chain, traced, all_spans(len(chain.layers)), seconds=options.repeat_seconds)
    dataset = Dataset(ModelFacts.of(chain, name), ())
    if Path(options.out).exists():
        dataset = Dataset.merge([dataset, Dataset.load(options.out)])
    failures = 0
    for worker in workers:
        shown.begin(worker.name)
        if worker.name not in {one.name for one in dataset.configurations}:
            try:
                done = profile_worker(worker, request, f"profile on {platform.node()}", options.timeout, shown.update)
                dataset = _with(dataset, done)
                dataset.save(options.out)
            except PipelineError as error:
                shown.say(f"lightning-accept profile: {error}")
                failures += 1
        shown.update(1.0)
    return failures


def _with(dataset: Dataset, configuration: Configuration) -> Dataset:
    return Dataset(dataset.model, (*dataset.configurations, configuration))
