from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_accept.codecs.backend import Backend
from lightning_accept.codecs.packing import nibble_bytes, plane_bytes

SHAPES = [(1, 1), (8, 5), (13, 35), (16, 1030), (3, 7), (24, 1), (9, 2049)]


def codes(shape: tuple[int, int], bits: int) -> torch.Tensor:
    return torch.randint(1 << bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))


@pytest.mark.parametrize("bits", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_planes_along_the_batch_are_numpys_packbits(kernels: Backend, shape: tuple[int, int], bits: int) -> None:
    source = codes(shape, bits)
    planes = kernels.pack_planes(source, bits, along_row=False)
    expected = [np.packbits((source.numpy() >> plane) & 1, axis=0).reshape(-1) for plane in range(bits)]
    np.testing.assert_array_equal(planes.numpy(), np.stack(expected))
    assert planes.shape[1] == plane_bytes(*shape, along_row=False)
    assert kernels.unpack_planes(planes, *shape, along_row=False).equal(source)


@pytest.mark.parametrize("bits", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_planes_along_the_row_are_numpys_packbits(kernels: Backend, shape: tuple[int, int], bits: int) -> None:
    source = codes(shape, bits)
    planes = kernels.pack_planes(source, bits, along_row=True)
    expected = [np.packbits((source.numpy() >> plane) & 1) for plane in range(bits)]
    np.testing.assert_array_equal(planes.numpy(), np.stack(expected))
    assert planes.shape[1] == plane_bytes(*shape, along_row=True)
    assert kernels.unpack_planes(planes, *shape, along_row=True).equal(source)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nibbles(kernels: Backend, shape: tuple[int, int]) -> None:
    source = codes(shape, 4)
    packed = kernels.pack_nibbles(source)
    assert packed.numel() == nibble_bytes(*shape, along_row=False)
    assert packed[0].tolist() == (source[0] * 16 + (source[1] if shape[0] > 1 else 0)).tolist()
    assert kernels.unpack_nibbles(packed, shape[0]).equal(source)


@pytest.mark.parametrize("along_row", [False, True])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("shape", [(13, 35), (16, 1030), (3, 7), (24, 1), (9, 2049), (1, 20001)], ids=str)
def test_decoding_looks_every_code_up(kernels: Backend, shape: tuple[int, int], bits: int, along_row: bool) -> None:
    source = codes(shape, bits)
    table = np.random.default_rng(0).standard_normal(1 << bits).astype(np.float32)
    planes = kernels.pack_planes(source, bits, along_row)
    decoded = kernels.decode_planes(planes, table, *shape, along_row)
    np.testing.assert_array_equal(decoded.numpy(), table[source.numpy()])
