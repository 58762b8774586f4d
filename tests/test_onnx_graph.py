"""A graph and a manifest that do not belong together are told when the bundle is opened, before any text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_model import export, write_folder

from starsd.edge.onnx_graph import VERSION
from starsd.edge.target_onnx import open_bundle
from starsd.shared import manifest
from starsd.shared.config import FLAVOURS, Engine
from starsd.shared.errors import BundleError
from starsd.shared.graph_contract import runs_on

Bundles = Callable[[str], Path]
RUNNABLE = tuple(flavour for flavour in FLAVOURS if runs_on(flavour, VERSION))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("graphs")
    source = write_folder(place / "source", num_hidden_layers=2)
    for flavour in RUNNABLE:
        export(source, place / flavour, flavour=flavour)
    return place


def altered(exported: Path, flavour: str, to: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of the bundle of a flavour whose manifest says something else."""
    shutil.copytree(exported / flavour, to)
    about = json.loads((to / manifest.FILE_NAME).read_text())
    change(about)
    (to / manifest.FILE_NAME).write_text(json.dumps(about))
    return to


@pytest.mark.parametrize(("flavour", "said"), [(one, other) for one in RUNNABLE for other in RUNNABLE if one != other])
def test_a_flavour_that_is_not_the_graphs(flavour: str, said: str, exported: Path, tmp_path: Path) -> None:
    folder = altered(exported, flavour, tmp_path / "b", lambda about: about.update(flavour=said))
    with pytest.raises(BundleError, match=rf"has inputs .*input_ids, .*, flavour {said} has .*logit_rows"):
        open_bundle(folder, Engine(threads=1))


@pytest.mark.parametrize("flavour", RUNNABLE)
def test_a_context_beyond_the_graphs_positions(flavour: str, exported: Path, tmp_path: Path) -> None:
    context = manifest.read(exported / flavour).shape.context
    change = lambda about: about["shape"].update(context=2 * context)  # noqa: E731
    folder = altered(exported, flavour, tmp_path / "b", change)
    with pytest.raises(BundleError, match=rf"has {context + 8} positions, its manifest says context {2 * context}$"):
        open_bundle(folder, Engine(threads=1))
    assert open_bundle(exported / flavour, Engine(threads=1)).shape.context == context
