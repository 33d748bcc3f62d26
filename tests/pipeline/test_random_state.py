"""The central node's random state on its way along the chain."""

from __future__ import annotations

import pytest
import torch

from lightning_accept.pipeline.random_state import borrowed_random_state


def test_the_body_draws_from_the_state_that_came_and_passes_it_on() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    expected = torch.rand(3)
    after = torch.get_rng_state()
    torch.manual_seed(9)
    own = torch.get_rng_state()
    x = torch.ones(1)
    with borrowed_random_state([x, state], present=True) as borrowed:
        assert borrowed.tensors == [x]
        borrowed.returned = [torch.rand(3)]
    drawn, passed_on = borrowed.returned
    assert torch.equal(drawn, expected)
    assert torch.equal(passed_on, after)
    assert torch.equal(torch.get_rng_state(), own)


def test_without_a_state_nothing_changes() -> None:
    x = torch.ones(1)
    with borrowed_random_state([x, None], present=False) as borrowed:
        assert borrowed.tensors == [x, None]
        borrowed.returned = [x]
    assert borrowed.returned == [x]


def test_an_error_in_the_body_leaves_the_own_state_alone() -> None:
    state = torch.get_rng_state()
    with pytest.raises(KeyError), borrowed_random_state([torch.get_rng_state()], present=True):
        torch.rand(3)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), state)


def test_a_missing_state_is_refused() -> None:
    with pytest.raises(ValueError, match="the random state is missing"), borrowed_random_state([None], present=True):
        pass
