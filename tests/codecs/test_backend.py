from __future__ import annotations

import logging
import sys

import pytest

from lightning_accept.codecs import backend as backend_module
from lightning_accept.codecs import reference, warm_up


def test_numba_is_chosen_where_it_is_there(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr(backend_module, "_chosen", None)
    with caplog.at_level(logging.INFO, "lightning_accept"):
        warm_up()
        warm_up()
    assert backend_module.backend().NAME == "numba"
    assert [record.message for record in caplog.records] == ["codecs run on numba kernels"]


def test_torch_takes_over_and_says_so_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(backend_module, "_chosen", None)
    monkeypatch.setitem(sys.modules, "lightning_accept.codecs.fast", None)
    monkeypatch.delattr("lightning_accept.codecs.fast", raising=False)
    with caplog.at_level(logging.INFO, "lightning_accept"):
        assert backend_module.backend() is reference
        assert backend_module.backend() is reference
    assert len(caplog.records) == 1
    assert "pip install 'lightning-accept[codecs]'" in caplog.records[0].message


def test_kernels_compile_where_no_cache_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    numba = pytest.importorskip("numba")
    from lightning_accept.codecs import kernels

    original = numba.njit

    def without_cache(*args: object, cache: bool = False, **options: object) -> object:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return original(*args, **options)

    monkeypatch.setattr(numba, "njit", without_cache)
    assert kernels._kernel("i8(i8)")(lambda x: x + 1)(41) == 42
