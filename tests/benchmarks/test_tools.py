from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
from edge import EdgeError, Host, Testbed, shaping, tools


def test_without_root_the_other_mode_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(EdgeError, match=r"need root; SlowLinks"):
        Testbed([Host("central")])


def test_missing_programs_are_named_with_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name, path: None if name != "ip" else "/sbin/ip")
    with pytest.raises(EdgeError, match="tc, ethtool not found; on Debian: apt-get install iproute2 ethtool"):
        Testbed([Host("central")])


def test_a_kernel_without_token_buckets_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*command: str) -> Any:
        raise EdgeError("tc: Error: Specified qdisc kind is unknown.")

    monkeypatch.setattr(shaping, "tool", refuse)
    with pytest.raises(EdgeError, match=r"no token bucket filter \(CONFIG_NET_SCH_TBF"):
        shaping.shape("space", "eth0", 1e6)


@pytest.mark.usefixtures("root")
def test_a_failing_program_is_quoted() -> None:
    with pytest.raises(EdgeError, match=r"ip netns del no-such-namespace: .*no-such-namespace"):
        tools.tool("ip", "netns", "del", "no-such-namespace")
