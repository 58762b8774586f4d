"""Runtimes around the toy target. Test modules name this one in `pytest_plugins`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tiny_session import ToyTarget, write_text_files

from starsd.edge import Runtime
from starsd.edge.text import Text


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text.open(write_text_files(tmp_path_factory.mktemp("text")))


@pytest.fixture
def open_one(text: Text) -> Iterator[Callable[..., Runtime]]:
    opened: list[Runtime] = []

    def make(target: Any = None, **options: Any) -> Runtime:
        opened.append(Runtime.around(target or ToyTarget(), text=text, name="toy", **options))
        return opened[-1]

    yield make
    for runtime in opened:
        runtime.close()
