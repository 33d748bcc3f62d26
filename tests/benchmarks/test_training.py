"""A model trains on the testbed, through a worker started by the ordinary command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from edge import EdgeError, Host, SlowLinks, Testbed

from lightning_accept.remote.tokens import TOKEN_VARIABLE, new_token

CENTRAL = """
import json, sys
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lightning_accept import AccEPTStrategy

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        layers = [nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)]
        self.net, self.losses = nn.Sequential(*layers), []

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

torch.manual_seed(0)
model = Model()
before = [value.clone() for value in model.state_dict().values()]
strategy = AccEPTStrategy(workers=sys.argv[1:], latency="flops")
trainer = L.Trainer(max_epochs=1, strategy=strategy, accelerator="cpu", logger=False, enable_checkpointing=False)
x = torch.randn(48, 16)
trainer.fit(model, DataLoader(TensorDataset(x, x[:, :4].argmax(1)), 8))
changed = [not torch.equal(a, b) for a, b in zip(before, model.state_dict().values())]
print("RESULT", json.dumps({"losses": model.losses, "changed": changed}))
"""


def train(hosts: Testbed | SlowLinks, folder: Path) -> dict[str, Any]:
    token = new_token()
    urls = hosts.start_workers(token)
    script = folder / "central.py"
    script.write_text(CENTRAL)
    central = [sys.executable, str(script), *urls]
    done = hosts.run(hosts.central, central, timeout=240, env={TOKEN_VARIABLE: token}, cwd=folder)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return result


@pytest.mark.usefixtures("root")
def test_two_hosts_train(tmp_path: Path) -> None:
    hosts = [Host("central", rate="10mbit"), Host("pi-1", rate=("4mbit", "1mbit"), delay=0.005, cpu=40)]
    with Testbed(hosts) as testbed:
        result = train(testbed, tmp_path)
    assert len(result["losses"]) == 6
    assert all(result["changed"])


def test_slow_links_train_without_root(tmp_path: Path) -> None:
    with SlowLinks([Host("central"), Host("pi-1", rate=("4mbit", "1mbit"), delay=0.005)]) as links:
        result = train(links, tmp_path)
    assert len(result["losses"]) == 6
    assert all(result["changed"])


@pytest.mark.parametrize(
    ("central", "worker", "message"),
    [
        ({}, {"cpu": 50}, "pi-1: CPU shares and memory limits need root"),
        ({}, {"memory": "1GiB"}, "pi-1: CPU shares and memory limits need root"),
        ({"rate": "1mbit"}, {}, "central: rate and delay of the central node need root"),
    ],
)
def test_slow_links_refuse_what_needs_root(central: Any, worker: Any, message: str) -> None:
    with pytest.raises(EdgeError, match=message):
        SlowLinks([Host("central", **central), Host("pi-1", **worker)])
