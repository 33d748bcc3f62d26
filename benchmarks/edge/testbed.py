"""Hosts as network namespaces with control groups: own rates, delay, CPU share and memory each. Needs root."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from . import leftovers
from .cpu import CpuGroup, hierarchy
from .errors import EdgeError
from .host import Host, Rates, check_cpu
from .hosts import Hosts
from .namespaces import Network
from .tools import missing

log = logging.getLogger(__name__)

_LAUNCH = str(Path(__file__).with_name("launch.py"))
_CROWDED = 0.85
"""Share of the machine above which hosts take time from each other, and from the relays of their links."""


def why_not() -> str | None:
    """Why a :class:`Testbed` is impossible here; None if it is not."""
    problem = missing()
    if problem is None:
        try:
            hierarchy()
        except EdgeError as error:
            problem = str(error)
    return problem


class Testbed(Hosts):
    """Emulated hosts; what an earlier testbed left behind whose process was killed is removed first.

    Commands begin with the host's rates, CPU share and memory limit in force, only workers start at full speed.

    Args:
        hosts: The first is the central node. Their addresses are 10.83.0.1, 10.83.0.2, ...
    """

    __test__ = False  # not a class of tests, whatever its name

    def __init__(self, hosts: Sequence[Host]) -> None:
        super().__init__(hosts)
        problem = why_not()
        if problem is not None:
            raise EdgeError(problem)
        cores = len(os.sched_getaffinity(0))
        wanted = sum(100.0 if host.cpu is None else host.cpu for host in hosts)
        if wanted > 100 * cores * _CROWDED:
            log.warning(
                "the hosts may use %.0f %% of a core together, and this machine has %d cores: times will vary; keep the"
                " sum of the CPU shares under %.0f %%",
                *(wanted, cores, 100 * cores * _CROWDED),
            )
        self._tag: leftovers.Tag | None = None
        self._network: Network | None = None
        self._groups: dict[str, CpuGroup] = {}
        self._shares = {host.name: host.cpu for host in hosts}

    @property
    def tag(self) -> str:
        """What its namespaces and control groups are called by."""
        assert self._tag is not None
        return self._tag.name

    def address(self, name: str) -> str:
        """The address of a host."""
        assert self._network is not None
        return self._network.address(name)

    def start_workers(
        self,
        token: str,
        threads: int = 1,
        names: Iterable[str] | None = None,
        arguments: Sequence[str] = (),
        timeout: float = 180.0,
    ) -> list[str]:
        """See :meth:`Hosts.start_workers`; CPU shares are in force from when all listen."""
        chosen = list(self.hosts)[1:] if names is None else list(names)
        for name in chosen:
            self._groups[name].limit(None)
        try:
            return super().start_workers(token, threads, chosen, arguments, timeout)
        finally:
            for name in chosen:
                self._groups[name].limit(self._shares[name])

    def set_cpu(self, name: str, percent: float | None) -> None:
        """Change a host's share of the processor, in percent of one core; None for no limit. At once."""
        check_cpu(name, percent)
        self._shares[name] = percent
        self._groups[name].limit(percent)

    def set_rate(self, name: str, rates: Rates) -> None:
        """Change the rates of a host's link; what waits in its queue may be lost and sent again."""
        assert self._network is not None
        self._network.set_rate(name, rates)

    def _claim(self) -> str:
        leftovers.remove_leftovers()
        self._tag = leftovers.Tag()
        return self.tag

    def _build(self, folder: Path) -> None:
        self._network = Network(self.tag, list(self.hosts.values()), folder)
        for name in self.hosts:
            self._groups[name] = CpuGroup.make(self.tag, name)
        self._network.build()
        for name, share in self._shares.items():
            self._groups[name].limit(share)

    def _before_end(self) -> None:
        for group in self._groups.values():
            group.limit(None)

    def _tear_down(self) -> None:
        if self._tag is None:
            return
        if self._network is not None:
            self._network.end_relays()
        leftovers.remove(self.tag)
        self._tag.release()
        self._tag, self._network, self._groups = None, None, {}

    def _prefix(self, name: str) -> list[str]:
        assert self._network is not None
        memory = self.hosts[name].memory_bytes()
        limit = "-" if memory is None else str(memory)
        return [sys.executable, "-S", _LAUNCH, self._network.namespace(name), str(self._groups[name].path), limit]

    def _listen(self, name: str) -> str:
        return self.address(name)

    def _reach(self, name: str, url: str) -> str:
        return url
