"""The explicit list of optimizers beyond ``torch.optim`` that a worker may run."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from torch.optim import Optimizer


def import_optimizers(names: Iterable[str]) -> dict[str, type[Optimizer]]:
    """Import the classes called ``names`` (``package.module.Class``).

    For names given by whoever starts the worker, never for those that come from the network.

    Raises:
        ValueError: If a name does not lead to an optimizer class.
    """
    allowed: dict[str, type[Optimizer]] = {}
    for name in names:
        module, _, attribute = name.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"--allow-optimizer {name}: cannot be imported here: {error}") from error
        if not (isinstance(found, type) and issubclass(found, Optimizer)):
            raise ValueError(f"--allow-optimizer {name}: not an optimizer class")
        # Under the name by which the central node knows the class, which may have been imported from elsewhere.
        allowed[f"{found.__module__}.{found.__qualname__}"] = found
    return allowed
