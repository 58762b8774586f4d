"""The fuzzer: a short run, and that it would find something."""

from __future__ import annotations

from typing import Any

import fuzz_protocol
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starsd.shared.codec import decode, encode
from starsd.shared.messages import (
    Message,
)


def test_fuzzing_for_two_seconds() -> None:
    outcomes = fuzz_protocol.run(2.0, seed=1)
    assert set(outcomes) == {"late", "message", "refused"}
    assert outcomes["refused"] > 10


def test_fuzzing_finds_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(data: bytes, layout_of: Any) -> Message:
        if data[:1] == b"\x11":
            raise KeyError(data[0])
        return decode(data, layout_of)

    monkeypatch.setattr(fuzz_protocol, "decode", careless)
    with pytest.raises(AssertionError, match=r"^frame 11[0-9a-f]* of \d+ bytes raises KeyError\(17\)$"):
        fuzz_protocol.run(5.0)


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_fuzzing_makes_honest_and_dishonest_frames(seed: int) -> None:
    """The fuzzer's own messages are honest, or it would only ever see refusals."""
    draw = np.random.default_rng(seed)
    for message in fuzz_protocol.samples(draw):
        assert type(decode(encode(message, fuzz_protocol.LAYOUT), lambda session: fuzz_protocol.LAYOUT)) is type(
            message
        )
