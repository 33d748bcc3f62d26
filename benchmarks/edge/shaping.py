"""The rate of one direction of a link, as a token bucket in front of a network device."""

from __future__ import annotations

from .errors import EdgeError
from .tools import tool

_QUEUE_SECONDS = 0.4
_QUEUE_BYTES = 64 * 1024
"""What may wait in front of a slow link, whichever is more. At 0.4 Mbit/s, 0.4 s would be 13 packets, which two
connections overrun as soon as they begin; no modem's queue is so short."""


def shape(namespace: str, device: str, rate: float | None) -> None:
    """Let ``device`` send at most ``rate`` bits per second, framing included; None for no limit.

    Raises:
        EdgeError: If the kernel has no token bucket filter.
    """
    if rate is None:
        if "tbf" in tool("tc", "-n", namespace, "qdisc", "show", "dev", device):
            tool("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")
        return
    bucket = ["tbf", "rate", f"{round(rate)}bit", "burst", "32kbit", "limit", str(_queue(rate))]
    try:
        tool("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *bucket)
    except EdgeError as error:
        if "unknown" not in str(error).lower() and "no such file" not in str(error).lower():
            raise
        raise EdgeError(
            f"this kernel has no token bucket filter (CONFIG_NET_SCH_TBF, module sch_tbf): {error}; use another kernel,"
            " hosts without a rate, or SlowLinks"
        ) from None


def _queue(rate: float) -> int:
    """Bytes that may wait for a link of so many bits per second."""
    return max(_QUEUE_BYTES, round(_QUEUE_SECONDS * rate / 8))


def packets_as_sent(namespace: str, device: str) -> None:
    """Switch off what glues packets together: a bundle of 64 kB would pass the bucket as one."""
    tool("ip", "netns", "exec", namespace, "ethtool", "-K", device, "tso", "off", "gso", "off", "gro", "off")
