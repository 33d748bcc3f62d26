"""Programs survive JSON, and anything that could not have been written is refused before anything runs."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accept.graph import Chain, ProgramError, StageProgram, trace
from lightning_accept.graph.encoding import decode_value, encode_value
from lightning_accept.graph.values import STAGE_DEVICE, Ref


class Everything(nn.Module):
    """Arguments of many types: dtypes, devices, infinities, sizes, lists, strings."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, width = x.shape
        x = self.norm(self.first(x)).to(torch.float64).to(torch.float32, copy=True)
        mask = torch.zeros(batch, width, dtype=torch.bool, device=x.device)
        x = x.masked_fill(mask, -math.inf).clamp(min=-1.0e30)
        x = x.contiguous(memory_format=torch.contiguous_format)
        x = torch.nn.functional.gelu(self.second(x), approximate="tanh")
        parts = x.split([1, 3], 1)
        x = torch.cat([parts[1], parts[0]], 1) + self.table + torch.tensor([1.0, 2.0, 3.0, 4.0])
        return x[:, [0, 2, 1, 3]].view(batch * 2, -1)


@pytest.fixture(scope="module")
def program() -> StageProgram:
    chain = Chain.from_trace(trace(Everything(), (torch.randn(3, 4),), {}))
    return chain.program(0, len(chain.layers))


@pytest.fixture
def data(program: StageProgram) -> dict[str, Any]:
    return copy.deepcopy(json.loads(program.to_json()))


def test_json_round_trip(program: StageProgram) -> None:
    text = program.to_json()
    again = StageProgram.from_json(text, program.constants)
    assert again.to_json() == text
    assert StageProgram.from_json(text.encode()).to_json() == text
    assert again.layers == ["first", "second"]
    assert again.constants.keys() == program.constants.keys() == program.constant_infos.keys()
    assert list(again.parameters) == [
        "first.weight",
        "first.bias",
        "norm.weight",
        "norm.bias",
        "second.weight",
        "second.bias",
    ]
    assert again.parameters["first.weight"].shape == (4, 4)
    assert again.parameters["first.weight"].requires_grad
    assert not again.buffers["table"].persistent
    assert again.buffers["norm.running_mean"].persistent


def test_no_device_travels(program: StageProgram) -> None:
    assert "cpu" not in program.to_json()
    assert '{"device":"stage"}' in program.to_json()


def test_tensors_of_a_program(program: StageProgram) -> None:
    module = Everything()
    tensors = program.tensors(dict(module.named_parameters()), dict(module.named_buffers()))
    assert tensors.keys() == {*program.parameters, *program.buffers, *program.constant_infos}
    assert tensors["first.weight"] is module.first.weight
    with pytest.raises(ProgramError, match=r"needs the buffer 'norm\."):
        program.tensors(dict(module.named_parameters()), {})
    with pytest.raises(ProgramError, match="needs the constant"):
        StageProgram.from_json(program.to_json(), {})


def test_equal_constants_travel_once(program: StageProgram) -> None:
    assert len(program.constants) == 2
    assert len({tensor.data_ptr() for tensor in program.constants.values()}) == 2


def test_random() -> None:
    chain = Chain.from_trace(
        trace(nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4)), (torch.randn(3, 4),), {})
    )
    assert chain.program(0, 1).random(training=True)
    assert not chain.program(0, 1).random(training=False)
    assert not chain.program(1, 2).random(training=True)
    chain = Chain.from_trace(trace(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)), (torch.randn(3, 4),), {}))
    assert not chain.program(0, 1).random(training=True)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        -(2**63),
        2**63 - 1,
        1.0,
        0.1,
        math.inf,
        -math.inf,
        "tanh",
        1 + 2j,
        complex(math.inf, 0),
        torch.float32,
        torch.bool,
        torch.strided,
        torch.channels_last,
        [1, [2.5, None], "x"],
        Ref("value", "x"),
        Ref("parameter", "a.b"),
        [Ref("buffer", "b"), Ref("constant", "c")],
        STAGE_DEVICE,
    ],
    ids=str,
)
def test_argument_round_trip(value: Any) -> None:
    again = decode_value(json.loads(json.dumps(encode_value(value), allow_nan=False)))
    assert again == value
    assert type(again) is type(value)


def test_nan_round_trip() -> None:
    assert math.isnan(decode_value(encode_value(math.nan)))


@pytest.mark.parametrize(
    "value",
    [object(), torch.zeros(1), torch.sparse_coo, torch.device("cpu"), {"a": 1}, b"x"],
    ids=["object", "tensor", "layout", "device", "dict", "bytes"],
)
def test_arguments_that_cannot_travel(value: Any) -> None:
    with pytest.raises(ProgramError, match="cannot hold"):
        encode_value(value)


@pytest.mark.parametrize(
    "value",
    [
        2**63,
        {"v": 3},
        {"v": "a", "p": "b"},
        {},
        {"float": "1e999"},
        {"float": "1.0"},
        {"device": "cuda:0"},
        {"dtype": "object"},
        {"dtype": []},
        {"layout": "sparse_coo"},
        {"module": "os"},
        {"complex": [1]},
        {"complex": ["a", 1]},
        [[[[[[[[[[1]]]]]]]]]],
    ],
    ids=str,
)
def test_odd_arguments_are_refused(value: Any) -> None:
    with pytest.raises(ProgramError):
        decode_value(value)


def node(data: dict[str, Any], op: str) -> dict[str, Any]:
    return next(item for item in data["train"]["nodes"] if item["op"] == op)


def remove(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda data: data.pop(key)


def put(value: Any, *path: Any) -> Callable[[dict[str, Any]], Any]:
    def change(data: dict[str, Any]) -> None:
        target: Any = data
        for step in path[:-1]:
            target = target[step]
        target[path[-1]] = value

    return change


def change_node(op: str, value: Any, *path: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda data: put(value, *path)(node(data, op))


LINEAR = "aten.linear.default"
NORM = "aten.batch_norm.default"

FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "other format": (put("zip", "format"), "format is 'zip'"),
    "other version": (put(2, "version"), "version 2, this machine reads version 1"),
    "version of another type": (put("1", "version"), "'version' of the program must be a int"),
    "missing part": (remove("eval"), "lacks 'eval'"),
    "unknown part": (put(1, "more"), "unknown key 'more'"),
    "layer that is no string": (put([3], "layers"), "layer's name"),
    "layer twice": (put(["a", "a"], "layers"), "twice"),
    "negative size": (put([-1], "parameters", "first.bias", "shape"), "list of sizes"),
    "size that is no number": (put([True], "parameters", "first.bias", "shape"), "list of sizes"),
    "unknown dtype": (put("quint8", "parameters", "first.bias", "dtype"), "unknown dtype"),
    "control characters": (put("a\nb", "train", "inputs", 0, "name"), "printable"),
    "long name": (put("a" * 1001, "train", "inputs", 0, "name"), "printable"),
    "dimension out of range": (put([5], "train", "inputs", 0, "dynamic"), "out of range"),
    "operation not on the list": (change_node(LINEAR, "aten.from_file.default", "op"), "not on the allow-list"),
    "storage": (change_node(LINEAR, "aten.set_.source_Tensor", "op"), "not on the allow-list"),
    "Python function": (change_node(LINEAR, "os.system", "op"), "not on the allow-list"),
    "operator that is not listed": (change_node(LINEAR, "operator.attrgetter", "op"), "not on the allow-list"),
    "custom operation": (change_node(LINEAR, "prim.device.default", "op"), "not on the allow-list"),
    "operation that is no string": (change_node(LINEAR, ["aten"], "op"), "'op' of a node must be a str"),
    "too few arguments": (change_node(LINEAR, [{"p": "first.weight"}], "args"), "lacks its argument 'weight'"),
    "too many arguments": (change_node(LINEAR, [None] * 9, "args"), "at most 3"),
    "unknown keyword": (change_node(LINEAR, {"out": None}, "kwargs"), "no argument 'out'"),
    "keyword given twice": (change_node(LINEAR, {"bias": None}, "kwargs"), "twice"),
    "string for a tensor": (change_node(LINEAR, "x", "args", 0), "wants Tensor"),
    "tensor for a number": (change_node(NORM, {"p": "first.bias"}, "args", 6), "wants float"),
    "number for a flag": (change_node(NORM, 7, "args", 5), "wants bool"),
    "generator": (put({"generator": 1}, "train", "nodes", 0, "kwargs"), "no argument 'generator'"),
    "dangling value": (change_node(LINEAR, {"v": "nowhere"}, "args", 0), "used before it is computed"),
    "dangling parameter": (change_node(LINEAR, {"p": "nowhere"}, "args", 1), "is not declared"),
    "dangling constant": (change_node(LINEAR, {"c": "nowhere"}, "args", 1), "is not declared"),
    "value of the future": (change_node(LINEAR, {"v": "gelu"}, "args", 0), "used before it is computed"),
    "name given twice": (change_node(NORM, "linear", "name"), "is given twice"),
    "item out of range": (change_node("operator.getitem", -1, "args", 1), "not negative"),
    "item of a tensor": (change_node("operator.getitem", {"v": "linear"}, "args", 0), "sequence of tensors"),
    "output that does not exist": (put(["nowhere"], "train", "outputs"), "output 'nowhere'"),
    "output that is no tensor": (put(["split_with_sizes"], "train", "outputs"), "is not a tensor"),
    "autocast of another dtype": (change_node(LINEAR, {"dtype": "x", "enabled": True}, "autocast"), "unknown dtype"),
    "grad mode that is no flag": (change_node(LINEAR, 1, "grad"), "'grad' of a node must be a bool"),
    "one name for two tensors": (
        put({"shape": [4], "dtype": "float32"}, "constants", "first.bias"),
        "must have different names",
    ),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forgeries_are_refused(data: dict[str, Any], name: str) -> None:
    change, words = FORGERIES[name]
    change(data)
    with pytest.raises(ProgramError, match=words.replace("(", r"\(")):
        StageProgram.from_json(json.dumps(data))


@pytest.mark.parametrize(
    "text",
    ["", "null", "[]", "{", '"x"', "NaN", '{"format": Infinity}', '{"a": 1, "a": 2}', "[" * 100_000, b"\xff\xfe"],
    ids=lambda text: repr(text)[:20],
)
def test_texts_that_are_no_programs(text: str | bytes) -> None:
    with pytest.raises(ProgramError):
        StageProgram.from_json(text)


def test_buffers_that_training_changes(program: StageProgram) -> None:
    assert set(program.changing_buffers()) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_a_norm_in_eval_mode_changes_nothing_and_a_view_of_a_buffer_is_the_buffer() -> None:
    class Counting(nn.Module):
        rows: Tensor
        mask: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4).eval()
            self.register_buffer("rows", torch.zeros(3, 4))
            self.register_buffer("mask", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            self.rows[1].copy_(x.detach()[0])
            result: Tensor = self.norm(x) * self.mask
            return result

    chain = Chain.from_trace(trace(Counting(), (torch.randn(3, 4),), {}))
    assert chain.program(0, len(chain.layers)).changing_buffers() == ["rows"]
