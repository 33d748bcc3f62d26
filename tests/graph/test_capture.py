"""What cannot be exported is refused with the reason, the user's own line and a cure; nothing is lost in silence."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import transformer

from lightning_accept.graph import TraceError, trace


class Faulty(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4, momentum=None)
        self.state = torch.zeros(4)
        self.calls = 0
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.layer(x)
        if self.fault == "branch" and h.sum() > 0:
            h = h * 2
        if self.fault == "branch in eval" and not self.training and h.max() > 0:
            h = h * 2
        if self.fault == "numpy":
            h = torch.from_numpy(h.detach().numpy())
        if self.fault == "raises":
            raise KeyError("no such key")
        if self.fault == "operation":
            h = torch.linalg.svd(h)[0]
        if self.fault == "indexing":
            h = h[h > 0]
        if self.fault == "momentum":
            h = self.norm(h)
        if self.fault == "overwrites":
            self.state.add_(1)
        if self.fault == "keeps":
            self.last = h.detach()
        return h


@pytest.mark.parametrize(
    ("fault", "words", "line"),
    [
        ("branch", "in train mode: the value of a tensor decides", 'if self.fault == "branch" and h.sum() > 0:'),
        ("branch in eval", "in eval mode: the value of a tensor decides", "not self.training and h.max() > 0:"),
        ("numpy", "numpy", "torch.from_numpy"),
        ("raises", "KeyError: 'no such key'", 'raise KeyError("no such key")'),
        ("operation", "aten.linalg_svd.default", "torch.linalg.svd(h)"),
        ("momentum", "the value of a tensor decides", "h = self.norm(h)"),
    ],
)
def test_refusals_name_reason_and_line(fault: str, words: str, line: str) -> None:
    module = Faulty(fault)
    with pytest.raises(TraceError) as caught:
        trace(module, (torch.randn(4, 4),), {})
    message = str(caught.value)
    assert words in message
    assert line in message
    assert f"{__file__}:" in message
    assert "pipeline a submodule without it" in message
    assert len(message.splitlines()) <= 4
    assert module.training
    assert module.calls == 0


def test_sizes_that_depend_on_values_are_refused() -> None:
    with pytest.raises(TraceError, match="depends on the values of another"):
        trace(Faulty("indexing"), (torch.randn(4, 4),), {})


def test_overwriting_a_plain_tensor_attribute_is_refused() -> None:
    module = Faulty("overwrites")
    with pytest.raises(TraceError, match=r"self\.state.*register_buffer"):
        trace(module, (torch.randn(4, 4),), {})
    assert torch.equal(module.state, torch.zeros(4))


def test_tensors_kept_in_attributes_are_warned_about() -> None:
    module = Faulty("keeps")
    with pytest.warns(UserWarning, match=r"self\.last.*not be updated"):
        trace(module, (torch.randn(4, 4),), {})
    assert not hasattr(module, "last")


def test_the_exporter_is_quiet(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    flags = {name: logging.getLogger(name).disabled for name in ("torch.fx", "torch._export")}
    trace(nn.LSTM(4, 4), (torch.randn(3, 4, 4),), {})
    with pytest.raises(TraceError):
        trace(Faulty("branch"), (torch.randn(4, 4),), {})
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
    assert flags == {name: logging.getLogger(name).disabled for name in flags}


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 10)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.encoder(self.embedding(ids), mask=mask))


def test_a_causal_mask_given_to_a_transformer(pipeline: Any) -> None:
    module = LanguageModel()
    ids = torch.randint(0, 10, (4, 6))
    detect = transformer._detect_is_causal_mask
    stages = pipeline(module, (ids,))
    assert transformer._detect_is_causal_mask is detect
    torch.testing.assert_close(stages.forward((ids,), {}, True), module(ids))
