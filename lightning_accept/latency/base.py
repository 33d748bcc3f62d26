"""What the strategy asks of a latency model: how long each device takes for every sub-model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from lightning_accept.latency.submodels import Measurement, Span
from lightning_accept.partition.times import SubModelTimes


class LatencyModel(ABC):
    """Predicts the time of every sub-model on every device, from a few measurements of each.

    The order of calls: :meth:`prepare` once for a model; then for each device :meth:`spans`, the measuring of those
    sub-models, and :meth:`learn` with what came of it. From then on :meth:`times` and :meth:`uncertainty` answer for
    that device, :meth:`check` takes in sub-models that were measured later, and :meth:`observe` what training reports.
    Devices are told apart by names that the caller chooses. Not safe to be called from several threads at once.
    """

    name: ClassVar[str]
    """What it is called in options: ``predictor``, ``capacity``, ``measured``."""

    @abstractmethod
    def prepare(self, layers: int, flops: Sequence[float], names: Sequence[str] = ()) -> None:
        """Start with a model, forgetting all devices.

        Args:
            layers: Number of its layers.
            flops: Forward FLOPs of each layer for one batch.
            names: Names of the layers; empty if they are not known.

        Raises:
            ValueError: If these contradict each other, or what the latency model was trained for.
        """

    @abstractmethod
    def spans(self, device: str, central: bool) -> list[Span]:
        """The sub-models to measure on a device.

        Args:
            device: The device's name.
            central: Whether it is the central node.
        """

    @abstractmethod
    def learn(self, device: str, measured: Sequence[Measurement]) -> None:
        """Take in what was measured on a device; replaces all that was known of it, observations included.

        Args:
            device: The device's name.
            measured: The sub-models of :meth:`spans`, in any order; infinity marks what the device cannot run.

        Raises:
            ValueError: If one of :meth:`spans` is missing, or a time is negative.
        """

    def check(self, device: str, measured: Measurement) -> None:
        """Take in a further sub-model that was measured on a device, as a plan would have it run there.

        Unlike what training reports, it was measured for its own sake: :meth:`times` of this sub-model may follow it at
        once. By default it counts as one report.

        Raises:
            ValueError: If the device was not learnt.
        """
        self.observe(device, measured)

    @abstractmethod
    def observe(self, device: str, sample: Measurement) -> None:
        """Take in the time of a device's stage that training reports, ideally the median of several batches.

        Such times carry noise, and overheads that measuring does not see; predictions follow them without jumping.
        A sample without positive, finite seconds is ignored.

        Raises:
            ValueError: If the device was not learnt.
        """

    @abstractmethod
    def times(self, device: str) -> SubModelTimes:
        """Times of all sub-models on a device; infinity where it is known that it cannot run one.

        Raises:
            ValueError: If the device was not learnt.
        """

    @abstractmethod
    def uncertainty(self, device: str) -> float:
        """Expected relative error of :meth:`times`, from how well predictions met what was observed.

        Raises:
            ValueError: If the device was not learnt.
        """


def check_model(layers: int, flops: Sequence[float], names: Sequence[str]) -> None:
    """Refuse what :meth:`LatencyModel.prepare` cannot work with.

    Raises:
        ValueError: If there are no layers, or not one value per layer.
    """
    if layers < 1:
        raise ValueError(f"a model needs at least one layer, not {layers}")
    if len(flops) != layers:
        raise ValueError(f"the model has {layers} layers but FLOPs are given for {len(flops)}")
    if names and len(names) != layers:
        raise ValueError(f"the model has {layers} layers but {len(names)} names are given")


def check_measured(
    device: str, layers: int, spans: Sequence[Span], measured: Sequence[Measurement]
) -> dict[Span, Measurement]:
    """Measurements by sub-model.

    Raises:
        ValueError: If one of ``spans`` is missing, a sub-model lies outside the model, or a time is negative.
    """
    found = {one.span: one for one in measured}
    missing = [span for span in spans if span not in found]
    if missing:
        raise ValueError(f"{device}: no measurement of the layers {missing[0]}; measure all that spans() names")
    for one in found.values():
        check_span(device, layers, one.span)
        if not (one.forward >= 0 and one.backward >= 0):
            raise ValueError(
                f"{device}: the layers {one.span} took {one.forward} s forward and {one.backward} s backward; times "
                "must not be negative, and must be infinite where a device cannot run the layers"
            )
    return found


def check_span(device: str, layers: int, span: Span) -> None:
    """Refuse a sub-model that the model does not have.

    Raises:
        ValueError: If so.
    """
    if not 0 <= span[0] < span[1] <= layers:
        raise ValueError(f"{device}: there are no layers {span} in a model of {layers} layers")
