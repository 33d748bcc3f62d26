"""Both implementations of the kernels, one after the other."""

from __future__ import annotations

import pytest

from lightning_accept.codecs import backend as backend_module
from lightning_accept.codecs import reference
from lightning_accept.codecs.backend import Backend


@pytest.fixture(params=["numba", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """The implementation that codecs use during the test."""
    if request.param == "numba":
        pytest.importorskip("numba")
        from lightning_accept.codecs import fast

        chosen: Backend = fast
    else:
        chosen = reference
    monkeypatch.setattr(backend_module, "_chosen", chosen)
    return chosen
