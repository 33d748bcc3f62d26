"""Data sets of measured sub-models: one model on many device configurations, kept as JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from lightning_accept.latency.model_facts import ModelFacts
from lightning_accept.latency.submodels import Measurement, Span

Fact: TypeAlias = str | int | float | bool | None
FORMAT = "lightning-accept latency data"
VERSION = 1


@dataclass(frozen=True)
class Configuration:
    """One device configuration and what was measured on it.

    Attributes:
        name: Unique within a data set.
        description: What makes it differ: threads, CPU share, dtype, machine and so on.
        measured: Times of sub-models, each once.
        repeats: Independent second measurements of some or all of them, which tell the noise.
    """

    name: str
    measured: tuple[Measurement, ...]
    repeats: tuple[Measurement, ...] = ()
    description: Mapping[str, Fact] = field(default_factory=dict)

    def by_span(self) -> dict[Span, Measurement]:
        """The measurements by sub-model."""
        return {one.span: one for one in self.measured}

    def to_json(self) -> dict[str, Any]:
        """As JSON; a sub-model that the device cannot run has null for its times."""
        return {
            "name": self.name,
            "description": dict(self.description),
            "measured": [_row(one) for one in self.measured],
            "repeats": [_row(one) for one in self.repeats],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Configuration:
        """The inverse of :meth:`to_json`."""
        return cls(
            name=str(value["name"]),
            measured=tuple(_measurement(row) for row in value["measured"]),
            repeats=tuple(_measurement(row) for row in value.get("repeats", ())),
            description=dict(value.get("description", {})),
        )


@dataclass(frozen=True)
class Dataset:
    """A model and its sub-models' times on many device configurations.

    Attributes:
        model: The model.
        configurations: The device configurations, with unique names.

    Raises:
        ValueError: If names are not unique, or a measurement does not fit the model.
    """

    model: ModelFacts
    configurations: tuple[Configuration, ...]

    def __post_init__(self) -> None:
        names = [one.name for one in self.configurations]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two device configurations are named {name!r}; give each its own name")
        layers = len(self.model.layers)
        for configuration in self.configurations:
            for one in (*configuration.measured, *configuration.repeats):
                if not (0 <= one.first < one.stop <= layers and one.forward >= 0 and one.backward >= 0):
                    raise ValueError(
                        f"configuration {configuration.name!r}: layers {one.span} with {one.forward} s forward and "
                        f"{one.backward} s backward do not fit a model of {layers} layers"
                    )

    def without(self, name: str) -> Dataset:
        """The data set without one configuration."""
        return Dataset(self.model, tuple(one for one in self.configurations if one.name != name))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON; a file that is there is replaced at once or not at all."""
        document = {
            "format": FORMAT,
            "version": VERSION,
            "model": asdict(self.model),
            "configurations": [one.to_json() for one in self.configurations],
        }
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            partial.write_text(json.dumps(document, allow_nan=False, separators=(",", ":")) + "\n")
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Dataset:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: If the file is something else, or contradicts itself.
            OSError: If it cannot be read.
        """
        try:
            document = json.loads(Path(path).read_text())
            if document["format"] != FORMAT or document["version"] != VERSION:
                raise ValueError(f"its format is {document['format']!r}, version {document['version']!r}")
            model = ModelFacts.from_json(document["model"])
            return cls(model, tuple(Configuration.from_json(value) for value in document["configurations"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{os.fspath(path)} is no latency data set of version {VERSION}: {error}") from error

    @classmethod
    def merge(cls, parts: Sequence[Dataset]) -> Dataset:
        """All configurations of several data sets of the same model.

        Raises:
            ValueError: If there are none, models differ, or two configurations have the same name.
        """
        if not parts:
            raise ValueError("there are no data sets to merge")
        model = parts[0].model
        for part in parts[1:]:
            for name, value in asdict(model).items():
                if name != "name" and asdict(part.model)[name] != value:
                    raise ValueError(
                        f"data sets of different models cannot be merged: {name} of {model.name!r} and of "
                        f"{part.model.name!r} differ"
                    )
        return cls(model, tuple(one for part in parts for one in part.configurations))


def _row(one: Measurement) -> list[int | float | None]:
    times = [one.forward, one.backward] if one.possible else [None, None]
    return [one.first, one.stop, *times]


def _measurement(row: Sequence[Any]) -> Measurement:
    first, stop, forward, backward = row
    if forward is None or backward is None:
        return Measurement(int(first), int(stop), math.inf, math.inf)
    return Measurement(int(first), int(stop), float(forward), float(backward))
