"""One ratio per device, as FTPipeHD has it."""

from __future__ import annotations

from lightning_accept.latency.base import check_measured
from lightning_accept.latency.scaled import ScaledModel, layer_times, singles, summed
from lightning_accept.latency.submodels import Span, representatives
from lightning_accept.partition.times import SubModelTimes


class Capacity(ScaledModel):
    """The central node measures every layer; another device's capacity is a single ratio to it (arXiv 2110.02781).

    The ratio is that of the whole model's time, or where the device cannot run the whole model, of a sub-model of
    middling size. A sub-model takes the sum of its layers' times.
    """

    name = "capacity"
    expected_error = 0.3

    def _wanted(self, device: str) -> list[Span]:
        if device == self._central:
            return singles(self._layers)
        by_size = representatives(self._flops, 3)
        return list(dict.fromkeys([(0, self._layers), by_size[len(by_size) // 2]]))

    def _times(self, device: str, factor: float) -> SubModelTimes:
        if self._central is None or self._central not in self._measured:
            raise ValueError("capacity compares devices with the central node, which has not been measured yet")
        central = self._measured[self._central]
        check_measured(self._central, self._layers, singles(self._layers), list(central.values()))
        forward, backward = layer_times(central, self._layers)
        if device != self._central:
            factor *= self._ratio(device, summed(forward, backward, self._impossible(self._central)))
        impossible = [*self._impossible(self._central), *self._impossible(device)]
        return summed(factor * forward, factor * backward, list(dict.fromkeys(impossible)))

    def _ratio(self, device: str, central: SubModelTimes) -> float:
        for span in self._wanted(device):
            there = self._measured[device][span].seconds
            here = central.forward(*span) + central.backward(*span)
            if 0 < there < float("inf") and 0 < here < float("inf"):
                return there / here
        raise ValueError(
            f"{device}: neither it and the central node could both run any of {self._wanted(device)}, so that their "
            "speeds cannot be compared; use latency='measured', or a smaller batch"
        )
