"""Edge devices emulated on one Linux machine: hosts with their own links and CPU shares, for benchmarks and tests."""

from .command import Command
from .errors import EdgeError
from .host import Host
from .proxy import Proxy
from .slow_links import SlowLinks
from .testbed import Testbed, why_not

__all__ = ["Command", "EdgeError", "Host", "Proxy", "SlowLinks", "Testbed", "why_not"]
