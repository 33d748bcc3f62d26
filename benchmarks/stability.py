"""How staleness lowers the largest stable learning rate, with and without weight prediction.

    python benchmarks/stability.py [--momentum 0.9] [--staleness 7] [--quick] [--json FILE]

SGD with momentum on quadratics of many curvatures, where every gradient is that of weights some updates old, or of
those that were predicted then. A quadratic whose weight has grown after many steps was not stable. What counts is the
learning rate times the curvature, so the figures hold for any curvature; they say nothing about noise, nor about losses
whose curvature changes.
"""

from __future__ import annotations

import argparse
from collections import deque

import torch
from report import Report
from torch import Tensor, nn

from lightning_accept.pipeline.prediction import predict_weights

STEPS = 4000


def largest_stable(momentum: float, staleness: int, predict: bool, count: int, steps: int = STEPS) -> float:
    """The largest learning rate times curvature with which a quadratic does not diverge.

    Args:
        momentum: Of SGD.
        staleness: How many updates old the weights are that a gradient is of.
        predict: Whether these are predicted over that many updates.
        count: Curvatures that are tried, between 0.001 and 4 in equal ratios.
        steps: Updates.
    """
    curvatures = torch.logspace(-3, 0.602, count, dtype=torch.float64)
    weight = nn.Parameter(torch.ones(count, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=momentum)
    used: deque[Tensor] = deque(maxlen=staleness + 1)
    for _ in range(steps):
        predicted = predict_weights([optimizer], staleness) if predict else {}
        used.append(predicted.get(weight, weight.detach()).clone())
        # Before there is anything so old, gradients are of the oldest there is, as when a pipeline fills.
        weight.grad = curvatures * used[0]
        optimizer.step()
    # Those that diverge soon reach infinity, and then NaN, which is not below anything either.
    stable = weight.detach().abs() <= 1.0
    first = int((~stable).nonzero()[0]) if not stable.all() else count
    return float(curvatures[first - 1]) if first else 0.0


def main() -> None:
    """Find the limit for every staleness."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--staleness", type=int, default=7, help="the largest one")
    parser.add_argument("--quick", action="store_true", help="few curvatures, to see that it runs")
    parser.add_argument("--json", help="write the raw figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("stability", arguments.quick)
    count = 20 if arguments.quick else 2000
    for staleness in range(arguments.staleness + 1):
        plain, predicted = (largest_stable(arguments.momentum, staleness, predict, count) for predict in (False, True))
        report.row(
            "limits", momentum=arguments.momentum, staleness=staleness, stashing=plain, weight_prediction=predicted
        )
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
