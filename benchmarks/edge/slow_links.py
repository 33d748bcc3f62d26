"""Slow links without root: workers on this machine, each behind a proxy with the rates and the delay of its link."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

from .errors import EdgeError
from .host import Host, Rates, split_rates
from .hosts import Hosts
from .proxy import Proxy


class SlowLinks(Hosts):
    """Hosts with slow links, and the whole machine's processor and memory.

    A message from one worker to the next passes only the receiver's proxy, so the sender's own rate does not count
    there. The central node connects to the workers and nobody to it: its link has no limits of its own.

    Args:
        hosts: The first is the central node.

    Raises:
        EdgeError: If a host asks for what only a :class:`Testbed` can do.
    """

    def __init__(self, hosts: Sequence[Host]) -> None:
        super().__init__(hosts)
        for host in hosts:
            if host.cpu is not None or host.memory is not None:
                raise EdgeError(f"host {host.name}: CPU shares and memory limits need root, and Testbed")
        central = hosts[0]
        if central.rate is not None or central.delay:
            raise EdgeError(f"host {central.name}: rate and delay of the central node need root, and Testbed")
        self._proxies: dict[str, list[Proxy]] = {name: [] for name in self.hosts}
        self._open = ExitStack()
        self._rates = {host.name: host.rate for host in hosts}

    def set_rate(self, name: str, rates: Rates) -> None:
        """Change the rates of a worker's link."""
        if name == self.central:
            raise EdgeError("the rate of the central node needs root, and Testbed")
        self._rates[name] = rates
        for proxy in self._proxies[name]:
            proxy.set_rates(*split_rates(name, rates))

    def set_cpu(self, name: str, percent: float | None) -> None:
        """Refused.

        Raises:
            EdgeError: Always.
        """
        raise EdgeError("CPU shares need root, and Testbed")

    def _claim(self) -> str:
        return "slow-links"

    def _build(self, folder: Path) -> None:
        pass

    def _before_end(self) -> None:
        pass

    def _tear_down(self) -> None:
        self._open.close()

    def _prefix(self, name: str) -> list[str]:
        return []

    def _listen(self, name: str) -> str:
        return "127.0.0.1"

    def _reach(self, name: str, url: str) -> str:
        place = urlsplit(url)
        assert place.hostname is not None and place.port is not None
        sending, receiving = split_rates(name, self._rates[name])
        proxy = Proxy((place.hostname, place.port), sending, receiving, self.hosts[name].delay)
        self._proxies[name].append(self._open.enter_context(proxy))
        return place._replace(netloc=f"127.0.0.1:{proxy.port}").geturl()
