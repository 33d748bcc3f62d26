"""The allow-list of optimizers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_accept.remote.optimizers import import_optimizers


def test_classes_are_imported_by_the_name_that_the_central_node_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_optimizer_module.py").write_text("import torch\nclass Mine(torch.optim.SGD): pass\n")
    (tmp_path / "own_optimizer_alias.py").write_text("from own_optimizer_module import Mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    allowed = import_optimizers(["own_optimizer_alias.Mine"])
    assert set(allowed) == {"own_optimizer_module.Mine"}
    assert issubclass(allowed["own_optimizer_module.Mine"], torch.optim.SGD)
    assert import_optimizers([]) == {}


@pytest.mark.parametrize("name", ["Adam", "", "no_such_module.Adam", "torch.optim.NoSuch"])
def test_names_that_lead_nowhere(name: str) -> None:
    with pytest.raises(ValueError, match=f"--allow-optimizer {name}: cannot be imported here"):
        import_optimizers([name])


def test_only_optimizers_are_allowed() -> None:
    with pytest.raises(ValueError, match=r"--allow-optimizer os\.system: not an optimizer class"):
        import_optimizers(["os.system"])
