"""Weight prediction: where constant gradients lead, prediction is exact or the formula's value."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_accept.pipeline.prediction import predict_weights


def test_sgd_with_momentum_moves_by_the_momentum_buffer() -> None:
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.tensor([1.0, 3.0])
    optimizer.step()
    weight.grad = torch.tensor([0.5, -1.0])
    optimizer.step()
    velocity = 0.9 * torch.tensor([1.0, 3.0]) + torch.tensor([0.5, -1.0])
    expected = weight.detach() - 3 * 0.1 * velocity
    torch.testing.assert_close(predict_weights([optimizer], 3)[weight], expected)


def test_in_steady_motion_the_prediction_comes_true() -> None:
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    for _ in range(400):  # until the momentum no longer changes
        weight.grad = torch.ones(1)
        optimizer.step()
    predicted = predict_weights([optimizer], 4)[weight]
    for _ in range(4):
        optimizer.step()
    torch.testing.assert_close(predicted, weight.detach())


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_adamw_in_steady_motion(decay: float) -> None:
    weight = nn.Parameter(torch.tensor([5.0]))
    optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=decay)
    for _ in range(50):  # constant gradients: each step is exactly lr, and the decay
        weight.grad = torch.tensor([2.0])
        optimizer.step()
    predicted = predict_weights([optimizer], 2)[weight]
    optimizer.step()
    optimizer.step()
    torch.testing.assert_close(predicted, weight.detach(), rtol=0, atol=1e-5)


def test_maximize_turns_the_move_around() -> None:
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, maximize=True)
    for _ in range(400):
        weight.grad = torch.ones(1)
        optimizer.step()
    predicted = predict_weights([optimizer], 1)[weight]
    optimizer.step()
    torch.testing.assert_close(predicted, weight.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("updates", [0, -1])
def test_nothing_outstanding_predicts_nothing(updates: int) -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.ones(1)
    optimizer.step()
    assert predict_weights([optimizer], updates) == {}


def test_without_momentum_or_before_the_first_step_nothing_moves() -> None:
    weight = nn.Parameter(torch.ones(1))
    plain = torch.optim.SGD([weight], lr=0.1)
    assert predict_weights([plain, None], 2) == {}
    weight.grad = torch.ones(1)
    plain.step()
    assert predict_weights([plain], 2) == {}
    assert predict_weights([torch.optim.Adam([weight])], 2) == {}


def test_the_weights_themselves_stay() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.ones(2)
    optimizer.step()
    before = weight.detach().clone()
    predict_weights([optimizer], 5)
    assert torch.equal(weight, before)
