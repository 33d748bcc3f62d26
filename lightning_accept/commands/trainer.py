"""``lightning-accept fit``, ``validate``, ``test`` and ``predict``: LightningCLI with this package's classes."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from typing_extensions import override

# Known by their short names once imported; the strategy also as "accept".
import lightning_accept.callbacks
import lightning_accept.models  # noqa: F401
from lightning_accept.data import DataNotFoundError
from lightning_accept.pipeline.messages import PipelineError


class AccEPTCLI(LightningCLI):
    """LightningCLI for any model and any data, run from the command line of this package."""

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        # LightningCLI would warn that there is a command line besides.
        self.config = parser.parse_object(args) if isinstance(args, (dict, Namespace)) else parser.parse_args(args)

    @override
    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except ValueError as error:
            if _raised_in(_cause(error)).startswith(("jsonargparse.", "lightning_accept.")):
                # What follows is the whole strategy or model again, down to the token.
                self.parser.error(str(error).partition("\nGiven value type:")[0], error)
            raise  # out of the user's own code, who needs the traceback


def run_trainer(arguments: Sequence[str]) -> int:
    """Run a command of the Trainer, ``arguments[0]``, and return the exit code."""
    # Classes of the user's own, as for a script that lies there.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    # Lightning still compares tree specs the old way, and newer torch says so at every epoch.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated", category=FutureWarning)
    try:
        AccEPTCLI(parser_kwargs={"prog": "lightning-accept"}, args=list(arguments))
    except (DataNotFoundError, MisconfigurationException, PipelineError) as error:
        print(f"lightning-accept {arguments[0]}: {error}", file=sys.stderr)
        return 1
    return 0


def _cause(error: BaseException) -> BaseException:
    """What a class raised, which jsonargparse wraps."""
    return error if error.__cause__ is None else _cause(error.__cause__)


def _raised_in(error: BaseException) -> str:
    """Name of the module that raised it."""
    trace: Any = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    return str(trace.tb_frame.f_globals.get("__name__", ""))
