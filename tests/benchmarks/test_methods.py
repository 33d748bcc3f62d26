from __future__ import annotations

import methods
import pytest

from lightning_accept import AccEPTStrategy, BitWidthScheduler, MultiBit, Raw, StochasticUniform


@pytest.mark.parametrize("task", methods.OUR_BITS)
@pytest.mark.parametrize("name", methods.METHODS)
def test_the_strategy_takes_all_arguments_but_a_missing_file(name: str, task: str) -> None:
    method = methods.METHODS[name]
    arguments = method.strategy_arguments(task, "none.safetensors")
    if method.latency == "predictor":
        with pytest.raises(ValueError, match=r"neither 'flops', 'measured' or 'capacity' nor the path"):
            AccEPTStrategy(2, **arguments)
        with pytest.raises(ValueError, match="needs the file of a latency predictor"):
            method.strategy_arguments(task)
    else:
        AccEPTStrategy(2, **arguments)


def test_what_is_compressed() -> None:
    codecs = {name: method.codecs("digits") for name, method in methods.METHODS.items()}
    assert [name for name, (forward, _) in codecs.items() if isinstance(forward, Raw)] == ["ftpipehd", "predictor only"]
    for name in ("compression only", "accept"):
        forward, backward = codecs[name]
        assert forward.config() == MultiBit(2, "signed", reinit_every_epoch=True).config()
        assert backward.config() == StochasticUniform(8).config()
    assert [codec.bits for codec in methods.ours("activity")] == [6, 4]


def test_the_papers_codecs_follow_the_learning_rate() -> None:
    schedulers = {name: method.callbacks() for name, method in methods.METHODS.items()}
    assert [name for name, made in schedulers.items() if made] == ["compression only", "accept"]
    (scheduler,) = schedulers["accept"]
    assert isinstance(scheduler, BitWidthScheduler)
    assert scheduler.bits == {"forward": 2, "backward": 8}
