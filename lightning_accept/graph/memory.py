"""How much memory a layer needs: its weights, and what it keeps for the backward."""

from __future__ import annotations

from lightning_accept.graph.flow import Flow
from lightning_accept.graph.values import Ref


def activation_bytes(flow: Flow) -> list[int]:
    """Bytes that each of ``flow.nodes`` allocates for a batch as traced and that a backward may need.

    An upper estimate: every new differentiable value counts, whether or not its operation keeps it; views and values
    overwritten in place count once.
    """
    counts = []
    for node in flow.nodes:
        ref = Ref("value", node.name)
        fresh = flow.roots.get(ref) == {ref} and flow.differentiable[node.name]
        counts.append(flow.values[ref].nbytes if fresh else 0)
    return counts
