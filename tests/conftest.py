"""Fixtures that several test files share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The default model as pulled, from the user's home; brought the first time. Mark its tests `model`."""
    from starsd.export.pull import pull

    return pull("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2_bundle(smollm2_folder: Path) -> Callable[[str], Path]:
    """The default model's bundle by precision, exported the first time. Mark its tests `model`."""
    from starsd.edge.bundle import ensure_bundle

    return lambda precision: ensure_bundle("smollm2-135m", precision)


@pytest.fixture
def starsd_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home for one test."""
    place = tmp_path / "home"
    monkeypatch.setenv("STARSD_HOME", str(place))
    monkeypatch.delenv("STARSD_QUOTA_GB", raising=False)
    return place
