"""The feature codecs: sizes to the byte, errors within half a step, nothing that is not a number."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from starsd.shared.errors import UsageError
from starsd.shared.features import CODECS, Codec, codec

PLAIN = ("fp16", "int8", "int4")
FINITE = st.floats(-60000, 60000, width=32)


@st.composite
def rows(draw: st.DrawFn) -> np.ndarray:
    count, width = draw(st.integers(0, 4)), draw(st.integers(1, 700))
    block = draw(arrays.arrays(np.float32, (count, width), elements=FINITE, fill=FINITE))
    return (block * np.float32(draw(st.sampled_from([1.0, 1e-3, 1e-7])))).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "width", "size"),
    [
        ("fp16", 4096, 8192),
        ("int8", 4096, 4112),
        ("int4", 4096, 2112),
        ("fp16", 576, 1152),
        ("int8", 576, 580),
        ("int4", 576, 298),
        ("int8", 1, 3),
        ("int4", 1, 3),
        ("int4", 3, 4),
        ("int4", 129, 69),
        ("rot4", 4096, 2176),
        ("rot3", 4096, 1664),
        ("rot2", 4096, 1152),
        ("rot4", 576, 306),
        ("rot3", 576, 234),
        ("rot2", 576, 162),
        ("rot3", 1, 26),
        ("rot3", 65, 52),
    ],
)
def test_documented_sizes(name: str, width: int, size: int) -> None:
    chosen = codec(name)
    assert chosen.row_bytes(width) == size
    assert len(chosen.encode(np.ones((5, width), np.float32))) == 5 * size
    assert chosen.encode(np.ones((0, width), np.float32)) == b""
    assert chosen.decode(b"", width).shape == (0, width)


@settings(max_examples=60, deadline=None)
@given(block=rows(), name=st.sampled_from(PLAIN))
def test_round_trip_is_off_by_half_a_step(block: np.ndarray, name: str) -> None:
    chosen = codec(name)
    data = chosen.encode(block)
    back = chosen.decode(data, block.shape[1])
    assert back.shape == block.shape
    assert back.dtype == np.float32
    if name == "fp16":
        np.testing.assert_array_equal(back, block.astype(np.float16).astype(np.float32))
        return
    steps = {"int8": 127, "int4": 7}[name]
    for start in range(0, block.shape[1], chosen.group):
        part = block[:, start : start + chosen.group]
        largest = np.abs(part).max(axis=1, initial=0.0)[:, None]
        # a step is the largest value's share, rounded up to float16: 2⁻¹⁰ relative, 2⁻²⁴ where float16 is subnormal
        step = largest / steps * (1 + 2**-10) + 2**-24
        assert (np.abs(back[:, start : start + chosen.group] - part) <= step / 2 * (1 + 1e-5)).all()


@settings(max_examples=40, deadline=None)
@given(block=rows(), name=st.sampled_from(sorted(CODECS)), data=st.data())
def test_rows_stand_alone(block: np.ndarray, name: str, data: st.DataObject) -> None:
    chosen, width = codec(name), block.shape[1]
    encoded = chosen.encode(block)
    size = chosen.row_bytes(width)
    pieces = [encoded[i * size : (i + 1) * size] for i in range(len(block))]
    assert pieces == [chosen.encode(block[i : i + 1]) for i in range(len(block))]
    order = data.draw(st.permutations(range(len(block))))
    shuffled = chosen.decode(b"".join(pieces[i] for i in order), width)
    np.testing.assert_array_equal(shuffled, chosen.decode(encoded, width)[list(order)])


@settings(max_examples=40, deadline=None)
@given(block=rows(), name=st.sampled_from(PLAIN))
def test_a_second_trip_changes_nothing(block: np.ndarray, name: str) -> None:
    block = block + np.sign(block) + (block == 0)  # scales in float16's normal range
    encoded = codec(name).encode(block)
    assert codec(name).encode(codec(name).decode(encoded, block.shape[1])) == encoded


def test_bytes_as_documented() -> None:
    """Vectors that another implementation can check itself against."""
    row = np.array([[7.0, -7.0, 3.0, 0.0, 1.0]], np.float32)
    assert codec("int4").encode(row).hex(" ") == "00 3c 1f 8b 89"
    assert codec("int8").encode(row * np.float32(127 / 7)).hex(" ") == "00 3c 7f 81 36 00 12"
    assert codec("fp16").encode(row).hex(" ") == "00 47 00 c7 00 42 00 00 00 3c"


def test_an_outlier_costs_only_its_group() -> None:
    row = np.full((1, 256), 0.5, np.float32)
    row[0, 3] = 5000.0
    back = codec("int4").decode(codec("int4").encode(row), 256)
    assert np.abs(back[0, 128:] - 0.5).max() < 0.001
    assert np.abs(back[0, 4:128] - 0.5).max() == pytest.approx(0.5)


@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_what_is_not_a_number_is_refused(name: str, bad: float) -> None:
    row = np.ones((2, 200), np.float32)
    row[1, 150] = bad
    with pytest.raises(ValueError, match=rf"features reach (nan|inf|1e\+30), {name} holds finite values up to"):
        codec(name).encode(row)


@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.parametrize("half", [b"\x00\x7c", b"\x00\xfc", b"\x01\x7e"])
def test_received_halves_are_checked(name: str, half: bytes) -> None:
    data = codec(name).encode(np.ones((2, 200), np.float32))
    with pytest.raises(ValueError, match="features are not finite"):
        codec(name).decode(half + data[2:], 200)


def test_lengths_and_shapes_are_checked() -> None:
    chosen = codec("int4")
    with pytest.raises(ValueError, match="features take 67 bytes, expected a multiple of 66"):
        chosen.decode(bytes(67), 128)
    with pytest.raises(ValueError, match="expected a multiple of"):
        chosen.decode(b"", 0)
    with pytest.raises(ValueError, match=r"features have shape \[128\], expected rows and width"):
        chosen.encode(np.zeros(128, np.float32))
    with pytest.raises(UsageError, match="codec 'zip' is unknown, expected one of fp16, int8, int4"):
        codec("zip")


def test_memoryviews_decode_without_a_copy_of_the_message() -> None:
    chosen = Codec("int8", 8, 512)
    block = np.linspace(-3, 3, 600, dtype=np.float32)[None]
    message = b"header" + chosen.encode(block)
    np.testing.assert_allclose(chosen.decode(memoryview(message)[6:], 600), block, atol=3 / 127)
