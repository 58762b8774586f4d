"""The rotated codecs: the map and the levels of docs/features.md, written down again, and what errors they leave."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_features import rows

from starsd.shared.features import codec

ROTATED = {"rot4": 4, "rot3": 3, "rot2": 2}
HADAMARD = np.array([[(-1) ** (i & j).bit_count() for j in range(64)] for i in range(64)])
SIGNS = np.array([(-1) ** (0x9E3779B97F4A7C15 >> i & 1) for i in range(64)])
HALVES = {
    2: [0.4528, 1.510],
    3: [0.2451, 0.7560, 1.344, 2.152],
    4: [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733],
}


def levels(bits: int) -> np.ndarray:
    return np.array([-level for level in reversed(HALVES[bits])] + HALVES[bits])


def rotated(block: np.ndarray) -> np.ndarray:
    """Rows (n, width) as (n, blocks, 64)."""
    padded = np.pad(block.astype(float), ((0, 0), (0, -block.shape[1] % 64)))
    return (padded.reshape(len(block), padded.shape[1] // 64, 64) * SIGNS) @ HADAMARD / 8


def read(data: bytes, bits: int, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Scales (blocks,) and codes (blocks, 64) of one row, bit by bit."""
    number = int.from_bytes(data[2 * blocks :], "little")
    codes = [number >> bits * i & 2**bits - 1 for i in range(64 * blocks)]
    return np.frombuffer(data[: 2 * blocks], "<f2").astype(float), np.array(codes).reshape(blocks, 64)


@settings(max_examples=60, deadline=None)
@given(block=rows(), name=st.sampled_from(sorted(ROTATED)))
def test_each_code_is_the_nearest_level_and_is_read_so(block: np.ndarray, name: str) -> None:
    bits, chosen, width = ROTATED[name], codec(name), block.shape[1]
    data, turned = chosen.encode(block), rotated(block)
    size, blocks = chosen.row_bytes(width), turned.shape[1]
    back = chosen.decode(data, width)
    assert back.dtype == np.float32
    for row in range(len(block)):
        scales, codes = read(data[row * size : (row + 1) * size], bits, blocks)
        values = scales[:, None] * levels(bits)[codes]
        off = np.abs(turned[row] - values)
        least = np.abs(turned[row][:, :, None] - scales[:, None, None] * levels(bits)).min(axis=2)
        largest = np.abs(block).max(initial=0.0)
        assert (off <= least + 1e-5 * largest + 1e-6).all()
        expected = (values @ HADAMARD / 8 * SIGNS).reshape(-1)[:width]
        np.testing.assert_allclose(back[row], expected, rtol=0, atol=1e-5 * np.abs(values).max() + 1e-9)


@settings(max_examples=60, deadline=None)
@given(block=rows(), name=st.sampled_from(sorted(ROTATED)))
def test_an_error_is_never_longer_than_its_block(block: np.ndarray, name: str) -> None:
    back = codec(name).decode(codec(name).encode(block), block.shape[1])
    for start in range(0, block.shape[1], 64):
        part = block[:, start : start + 64].astype(float)
        error = np.linalg.norm(back[:, start : start + 64] - part, axis=1)
        assert (error <= np.linalg.norm(part, axis=1) * 1.001 + 1e-6).all()  # float16 rounds the scale


@pytest.mark.parametrize(("name", "share"), [("rot4", 0.09), ("rot3", 0.175), ("rot2", 0.33)])
def test_errors_of_normally_distributed_values(name: str, share: float) -> None:
    block = np.random.default_rng(0).normal(size=(50, 576)).astype(np.float32) * np.float32(3)
    back = codec(name).decode(codec(name).encode(block), 576)
    assert np.linalg.norm(back - block) / np.linalg.norm(block) == pytest.approx(share, rel=0.03)


@pytest.mark.parametrize(("name", "share"), [("rot4", 0.5), ("rot3", 0.8)])
def test_a_large_channel_costs_less_than_in_int4(name: str, share: float) -> None:
    block = np.random.default_rng(0).normal(size=(50, 576)).astype(np.float32)
    block[:, 100] = 40.0
    others = np.arange(576) != 100

    def error(of: str) -> float:
        back = codec(of).decode(codec(of).encode(block), 576)
        return float(np.linalg.norm((back - block)[:, others]))

    assert error(name) < share * error("int4")


@pytest.mark.parametrize("name", sorted(ROTATED))
def test_extremes_stay_finite(name: str) -> None:
    block = np.array([np.full(64, 65504.0), SIGNS * 65504.0, np.zeros(64), np.full(64, 1e-30)], np.float32)
    back = codec(name).decode(codec(name).encode(block), 64)
    assert np.isfinite(back).all()
    assert np.abs(back[:2]).max() > 50000
    assert not back[2:].any()


def test_bytes_as_documented() -> None:
    """Vectors that another implementation can check itself against."""
    turned = np.array([[2, 1, 0.5, 0.125, -0.125, -0.5, -1, -2] + [0.25, -0.75] * 28])
    row = (turned @ HADAMARD / 8 * SIGNS).astype(np.float32)
    assert row[0, :4].tolist() == [1.75, 3.84375, -0.59375, 0.0]
    assert {name: codec(name).encode(row).hex() for name in ROTATED} == {
        "rot4": "1039df8a5702" + "39" * 28,
        "rot3": "1139773905" + "0cc330" * 7,
        "rot2": "7a38af05" + "22" * 14,
    }
