"""Forward FLOPs of single operations, counted on tensors without data."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_accept.graph.allowed import aten_names
from lightning_accept.graph.flow import Flow
from lightning_accept.graph.ops import get_op
from lightning_accept.graph.values import STAGE_DEVICE, Ref, map_refs

_COUNTED = aten_names(
    """
    addbmm.default addmm.default addmv.default baddbmm.default bilinear.default bmm.default conv1d.default
    conv1d.padding conv2d.default conv2d.padding conv3d.default conv3d.padding conv_transpose1d.default
    conv_transpose2d.input conv_transpose3d.input convolution.default dot.default einsum.default gru.input
    gru_cell.default linear.default lstm.input lstm_cell.default matmul.default mm.default mv.default
    rnn_relu.input rnn_tanh.input scaled_dot_product_attention.default tensordot.default
    """
)


def count_flops(flow: Flow) -> list[int]:
    """Forward FLOPs of each of ``flow.nodes`` for a batch as traced (2 per multiply-add; 0 for all but products)."""
    return [_count(flow, position) if node.op in _COUNTED else 0 for position, node in enumerate(flow.nodes)]


def _count(flow: Flow, position: int) -> int:
    node = flow.nodes[position]

    def stand_in(ref: Ref) -> Any:
        if ref.kind == "value" and ref.name in flow.sizes:
            return flow.graph.hints[ref.name]
        value = flow.values[ref]
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    args = [_placed(map_refs(value, stand_in)) for value in node.args]
    kwargs = {name: _placed(map_refs(value, stand_in)) for name, value in node.kwargs.items()}
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        get_op(node.op).function(*args, **kwargs)
    return int(counter.get_total_flops())


def _placed(value: Any) -> Any:
    return torch.device("meta") if value is STAGE_DEVICE else value
