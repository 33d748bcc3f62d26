"""Modules and inputs named on the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import nn

from lightning_accept.commands.user_module import UserModuleError, build_module, choose_part, make_input

SOURCE = """
from torch import nn

class Net(nn.Linear):
    def __init__(self, width, out=2):
        super().__init__(width, out)

def make(width=3):
    return nn.Sequential(nn.Linear(width, 2))

ready = nn.Linear(4, 1)
number = lambda: 5
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The current folder holds a module of the user's."""
    (tmp_path / "users_models.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield
    sys.modules.pop("users_models", None)


def test_classes_functions_and_objects() -> None:
    assert build_module("users_models.Net", "[5]").in_features == 5
    assert build_module("users_models:Net", '{"width": 6, "out": 3}').out_features == 3
    assert isinstance(build_module("users_models.make"), nn.Sequential)
    assert build_module("users_models.ready").in_features == 4


@pytest.mark.parametrize(
    ("path", "arguments", "problem"),
    [
        ("Net", None, "cannot find 'Net'.*write it like package.module.Name"),
        ("users_models.Nothing", None, "has no attribute 'Nothing'"),
        ("no_such_package.Net", None, "No module named 'no_such_package'"),
        ("users_models.Net", None, "does not take these arguments.*give them with --args"),
        ("users_models.Net", "5", "must be a JSON list or object"),
        ("users_models.Net", "{", "--args is not JSON"),
        ("users_models.number", None, "gives a int, not a module"),
    ],
)
def test_mistakes(path: str, arguments: str | None, problem: str) -> None:
    with pytest.raises(UserModuleError, match=problem):
        build_module(path, arguments)


def test_shapes() -> None:
    (image, tokens), _ = make_input(nn.Linear(1, 1), ["4,3,8,8", "4,20:int64"])
    assert (image.shape, image.dtype) == ((4, 3, 8, 8), torch.float32)
    assert (tokens.shape, tokens.dtype) == ((4, 20), torch.int64)


@pytest.mark.parametrize("shape", ["", "4,x", "4,0", "-1,3", "4.5", "4,,3"])
def test_shapes_that_are_none(shape: str) -> None:
    with pytest.raises(UserModuleError, match="is no shape; write it like"):
        make_input(nn.Linear(1, 1), [shape])
    with pytest.raises(UserModuleError, match="there is no dtype 'float3'; choose among float64"):
        make_input(nn.Linear(1, 1), ["4:float3"])


def test_the_modules_example() -> None:
    module = nn.Linear(3, 1)
    with pytest.raises(UserModuleError, match="give the shape of the input"):
        make_input(module, [])
    x = torch.zeros(2, 3)
    for example, expected in ((x, ((x,), {})), ((x, x), ((x, x), {})), ({"input": x}, ((), {"input": x}))):
        module.example_input_array = example
        assert make_input(module, []) == expected


def test_parts() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 1)))
    assert choose_part(net, None) is net
    assert choose_part(net, "1.0") is net[1][0]
    with pytest.raises(UserModuleError, match="Sequential has no submodule '7'"):
        choose_part(net, "7")


def test_parts_of_a_lightning_module() -> None:
    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.head = nn.Linear(2, 2), nn.Linear(2, 1)

    model = Model()
    assert choose_part(model, "head") is model.head
    with pytest.raises(UserModuleError, match="has 2 children with parameters"):
        choose_part(model, None)
