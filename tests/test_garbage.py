"""What the garbage collector looks at while training, and afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from lightning_accept.garbage import Freeze, settle


class Node:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_settle_collects_first() -> None:
    node = weakref.ref(Node())
    settle()
    assert node() is None and gc.get_freeze_count() > 0


def test_settling_again_collects_what_was_frozen() -> None:
    node = Node()
    settle()
    gone = weakref.ref(node)
    del node
    gc.collect()
    assert gone() is not None
    settle()
    assert gone() is None


def test_a_freeze_ends() -> None:
    freeze = Freeze()
    freeze.begin()
    freeze.begin()
    assert gc.get_freeze_count() > 0
    freeze.end()
    freeze.end()
    assert gc.get_freeze_count() == 0


def test_what_somebody_else_has_frozen_stays_frozen() -> None:
    gc.freeze()
    freeze = Freeze()
    freeze.begin()
    freeze.end()
    assert gc.get_freeze_count() > 0
