"""Stand-ins for methods of the user's objects."""

from __future__ import annotations

import torch
from torch import nn

from lightning_accept.stand_ins import StandIns, watch_zero_grad


class Thing:
    def speak(self) -> str:
        return "class"


def test_methods_of_the_class_and_of_the_instance_are_given_back() -> None:
    plain, special = Thing(), Thing()
    special.speak = lambda: "instance"  # type: ignore[method-assign]
    stand_ins = StandIns()
    for thing in (plain, special):
        stand_ins.put(thing, "speak", lambda: "stand-in")
        assert thing.speak() == "stand-in"
    stand_ins.give_back()
    assert plain.speak() == "class"
    assert vars(plain) == {}
    assert special.speak() == "instance"


def test_stand_ins_on_top_of_each_other_are_undone_in_reverse() -> None:
    thing, stand_ins, order = Thing(), StandIns(), []
    stand_ins.put(thing, "speak", lambda: "first")
    stand_ins.put(thing, "speak", lambda: "second")
    stand_ins.undo_with(lambda: order.append(thing.speak()))
    stand_ins.give_back()
    stand_ins.give_back()
    assert order == ["second"]
    assert thing.speak() == "class"


def test_every_zero_grad_is_told_and_still_done() -> None:
    module = nn.Linear(2, 1)
    optimizers = [torch.optim.SGD([module.weight], lr=0.1), torch.optim.SGD([module.bias], lr=0.1)]
    told: list[int] = []
    stand_ins = StandIns()
    watch_zero_grad(stand_ins, [module, module], [[optimizer] for optimizer in optimizers], told.append)
    module(torch.ones(1, 2)).sum().backward()
    optimizers[1].zero_grad()
    assert told == [1]
    assert module.bias.grad is None
    assert module.weight.grad is not None
    module.zero_grad()
    assert told == [1, 0, 1]
    assert module.weight.grad is None
    stand_ins.give_back()
    optimizers[0].zero_grad()
    assert told == [1, 0, 1]
