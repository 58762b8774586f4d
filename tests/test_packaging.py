"""What is shipped: the wheel's content, and that it decodes where there is neither torch nor transformers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("edge", "server", "shared", "export", "scripts")
COMMANDS = ("starsd", "starsd-edge", "starsd-server", "starsd-export")


def run(command: Sequence[str | Path], *, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run to success, else fail with what the command said."""
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**outside, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel built from that sdist, so that nothing can be missing from either."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE", *PACKAGES):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tree / name)
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", tree / "dist", tree], cwd=tree)
    return tree / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


def test_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            inside = f"starsd/{path.relative_to(ROOT).as_posix()}"
            if path.is_file() and path.suffix not in (".sh", ".pyc"):
                assert inside in names
        assert f"starsd/{package}/py.typed" in names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"starsd", wheel.name.partition("-py3")[0] + ".dist-info"}


def test_wheel_describes_itself(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA")).rpartition("/")[0]
        metadata = message_from_string(archive.read(f"{info}/METADATA").decode())
        commands = archive.read(f"{info}/entry_points.txt").decode()
        licence = archive.read(f"{info}/licenses/LICENSE").decode()
    assert [line.partition(" = ")[0] for line in commands.splitlines()[1:]] == sorted(COMMANDS)
    assert licence == (ROOT / "LICENSE").read_text()
    assert "END OF TERMS AND CONDITIONS" in licence
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("Provides-Extra") == ["edge", "server", "export", "jetson", "update", "dev"]
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_edge_extra_is_light(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        required = message_from_string(archive.read(info).decode()).get_all("Requires-Dist") or []
    edge = {line.split(";")[0].split(">")[0] for line in required if 'extra == "edge"' in line or "extra" not in line}
    light = {"jinja2", "msgspec", "numpy", "onnxruntime", "rich", "threadpoolctl", "tokenizers", "typer", "websockets"}
    light |= {
        "fastapi",
        "llguidance",
        "prometheus-client",
        "starlette",
        "uvicorn",
    }  # run: the API and its answers' forms
    assert edge == light
    assert not [line for line in required if line.startswith(("tensorrt", "onnxruntime-gpu"))]


def test_sdist_holds_the_licence_and_no_leftovers(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert {"LICENSE", "README.md", "pyproject.toml", "edge/target.py", "shared/py.typed"} <= set(names)
    assert not [name for name in names if name.endswith(".pyc") or name.startswith(("build/", "dist/", "."))]


@pytest.fixture(scope="module")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a new environment with `starsd[edge]` from the wheel, at the versions that development uses."""
    place = tmp_path_factory.mktemp("fresh")
    run([sys.executable, "-m", "venv", place / "env"], cwd=place)
    programs = place / "env" / "bin"
    pip = [programs / "python", "-m", "pip", "--disable-pip-version-check", "--no-input"]
    run([*pip, "install", "--quiet", "-c", ROOT / "constraints.txt", f"{wheel}[edge]"], cwd=place)
    return programs


@pytest.mark.fresh
def test_edge_installs_without_torch_and_transformers(fresh: Path, tmp_path: Path) -> None:
    code = "import importlib.util, sys; print(*[m for m in sys.argv[1:] if importlib.util.find_spec(m)])"
    absent = ("torch", "transformers", "onnx", "gguf", "safetensors", "sentencepiece")
    done = run([fresh / "python", "-c", code, *absent, "onnxruntime"], cwd=tmp_path)
    assert done.stdout.split() == ["onnxruntime"]
    run([fresh / "python", "-m", "pip", "check"], cwd=tmp_path)


@pytest.mark.fresh
@pytest.mark.parametrize("command", COMMANDS)
def test_help_needs_no_other_extra(fresh: Path, tmp_path: Path, command: str) -> None:
    done = run([fresh / command, "--help"], cwd=tmp_path, COLUMNS="100", NO_COLOR="1")
    assert f"Usage: {command}" in done.stdout


@pytest.mark.fresh
@pytest.mark.model
def test_edge_generates_the_same_without_torch(
    fresh: Path, smollm2_bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    bundle = smollm2_bundle("int4")
    asked = ["generate", "--model", bundle, "--prompt", "The sky is", "--max-new-tokens", "8", "--json"]
    here = run([Path(sys.executable).with_name("starsd-edge"), *asked], cwd=tmp_path)
    there = run([fresh / "starsd-edge", *asked], cwd=tmp_path)
    rows = [json.loads(done.stdout) for done in (here, there)]
    assert len(rows[0]["token_ids"]) == 8
    assert rows[0]["token_ids"] == rows[1]["token_ids"]
