"""Which module is pipelined."""

from __future__ import annotations

import lightning as L
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_accept.choose import choose_module


class OneChild(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        self.loss = nn.CrossEntropyLoss()  # no parameters: no choice


class TwoChildren(OneChild):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 1)


class WithForward(TwoChildren):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Childless(L.LightningModule):
    pass


def test_the_module_itself_if_it_defines_forward() -> None:
    module = WithForward()
    assert choose_module(module, None) == (module, "WithForward")


def test_the_only_child_with_parameters() -> None:
    module = OneChild()
    assert choose_module(module, None) == (module.net, "net")


def test_a_path_wins() -> None:
    module = WithForward()
    assert choose_module(module, "net.1") == (module.net[1], "net.1")


def test_an_ambiguous_choice_lists_what_there_is() -> None:
    with pytest.raises(
        MisconfigurationException, match=r"has 2 children with parameters; .*\(module=...\): 'net', 'head'"
    ):
        choose_module(TwoChildren(), None)
    with pytest.raises(MisconfigurationException, match=r"has 0 children with parameters; .*: none"):
        choose_module(Childless(), None)


@pytest.mark.parametrize("path", ["nett", "net.7", "net.0.weight"])
def test_a_path_that_leads_nowhere(path: str) -> None:
    with pytest.raises(MisconfigurationException, match=r"has no such module; its children with parameters are 'net'"):
        choose_module(OneChild(), path)
