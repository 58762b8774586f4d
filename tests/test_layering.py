"""Who may import whom, where the heavy libraries may appear, and what no file may say.

scripts ─► edge, server, export ─► shared ─► stdlib, numpy, msgspec
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("edge", "server", "shared", "export", "scripts")
LONGEST = 350  # lines; about 250 is the aim

MAY_IMPORT = {
    "shared": {"shared"},
    "edge": {"edge", "shared"},
    "server": {"server", "shared"},
    "export": {"export", "shared"},
    "scripts": {"scripts", "edge", "server", "export", "shared"},
}

# Small libraries, anywhere in these packages.
LIGHT = {
    "shared": {"msgspec", "numpy"},
    "edge": {"msgspec", "numpy", "rich", "threadpoolctl", "typer"},
    "server": {"msgspec", "numpy", "safetensors", "typer"},
    "export": {"google.protobuf", "ml_dtypes", "msgspec", "numpy", "safetensors", "typer"},
    "scripts": {"msgspec", "numpy", "typer"},
}

# Everything else, only in these files. A new line here is a decision: a device starts without what it does not use.
HEAVY = {
    "cryptography": {"edge/update_sign.py"},
    "fastapi": {"edge/api.py"},
    "gguf": {"export/gguf_file.py"},
    "huggingface_hub": {"export/hub_source.py"},
    "jinja2": {"shared/template.py"},
    "jtop": {"edge/telemetry_jtop.py"},
    "llama_cpp": {"scripts/bench_peers.py"},
    "llguidance": {"edge/grammar.py", "edge/grammar_rules.py"},
    "onnx": {"export/graph.py", "export/linear.py", "export/tensorrt_graph.py"},
    "onnxruntime": {
        "edge/onnx_gpu.py",
        "edge/onnx_graph.py",
        "edge/onnx_host.py",
        "export/check.py",
        "scripts/doctor.py",
    },
    "packaging": {"edge/update.py"},
    "safetensors": {"edge/target_torch.py"},
    "prometheus_client": {"edge/api_metrics.py"},
    "pynvml": {"edge/telemetry_nvidia.py"},
    "rich": {"scripts/demo_table.py"},
    "sentencepiece": {"export/tokenizer_model.py"},
    "starlette": {"edge/api.py", "edge/api_guard.py", "edge/api_responses.py", "edge/api_web.py"},
    "threadpoolctl": {"scripts/demo_star.py"},
    "tensorrt": {"shared/tensorrt_bindings.py"},
    "tokenizers": {
        "edge/detokenize.py",
        "edge/text.py",
        "export/gguf_tokenizer.py",
        "export/tokenizer_model.py",
        "export/train_chat.py",
    },
    "transformers": {"scripts/bench_peers.py"},
    "torch": {
        "edge/target_torch.py",
        "export/train_batch.py",
        "export/train_checkpoint.py",
        "export/train_drafter.py",
        "export/train_generate.py",
        "export/train_head.py",
        "export/train_loop.py",
        "export/train_save.py",
        "export/train_start.py",
        "export/train_store.py",
        "export/train_target.py",
        "scripts/bench_drafter.py",
        "scripts/bench_peers.py",
        "scripts/local_head.py",
        "server/batch.py",
        "server/drafter_eagle.py",
        "server/dynamic_tree.py",
        "server/eagle_heads.py",
        "server/eagle_layer.py",
        "server/products.py",
        "server/projector.py",
        "server/random_head.py",
        "server/selftest.py",
        "server/slots.py",
    },
    "uvicorn": {"edge/run.py"},
    "websockets": {"edge/link.py", "server/gateway.py"},
    "zmq": {"server/pool.py", "server/worker.py"},
}


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of whatever a file imports, wherever in it, by statement or by name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in ("import_module", "__import__"):
                yield node.lineno, str(node.args[0].value)


def complaint(place: str, name: str) -> str | None:
    """Why the file at `place` (package/module.py) may not import `name`; None when it may."""
    package = place.partition("/")[0]
    top, _, rest = name.partition(".")
    if top == "starsd":
        other = rest.partition(".")[0]
        return None if other in MAY_IMPORT[package] else f"{package} may not import starsd.{other}"
    if top in sys.stdlib_module_names:
        return None
    if any(name == light or name.startswith(f"{light}.") for light in LIGHT[package]) or place in HEAVY.get(top, ()):
        return None
    return f"{top} may be imported only in {', '.join(sorted(HEAVY.get(top, ()))) or 'no file'}"


def test_every_import_is_allowed() -> None:
    wrong = []
    for path in sources():
        place = path.relative_to(ROOT).as_posix()
        for line, name in imported(path):
            if (reason := complaint(place, name)) is not None:
                wrong.append(f"{place}:{line}: {reason}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("place", "name", "reason"),
    [
        ("edge/session.py", "starsd.server.service", "edge may not import starsd.server"),
        ("server/service.py", "starsd.export.pull", "server may not import starsd.export"),
        ("export/pull.py", "starsd.edge.target", "export may not import starsd.edge"),
        ("shared/tree.py", "starsd.scripts.cli", "shared may not import starsd.scripts"),
        ("scripts/cli.py", "starsd.edge.target", None),
        ("shared/tree.py", "typer", "typer may be imported only in no file"),
        ("shared/template.py", "jinja2.sandbox.ImmutableSandboxedEnvironment", None),
        ("edge/session.py", "gguf", "gguf may be imported only in export/gguf_file.py"),
        ("edge/session.py", "shared.tree", "shared may be imported only in no file"),
        ("export/tokenizer_model.py", "google.protobuf.message.DecodeError", None),
    ],
)
def test_complaints(place: str, name: str, reason: str | None) -> None:
    assert complaint(place, name) == reason


def test_the_list_of_heavy_imports_is_no_longer_than_needed() -> None:
    used = {
        (name.partition(".")[0], path.relative_to(ROOT).as_posix()) for path in sources() for _, name in imported(path)
    }
    unused = [
        f"{module} in {place}"
        for module, places in HEAVY.items()
        for place in places - {p for m, p in used if m == module}
    ]
    assert not unused


@pytest.mark.parametrize("module", ["starsd.edge", "starsd.edge.cli", "starsd.edge.session"])
def test_the_edge_starts_without_heavy_libraries(module: str) -> None:
    heavy = {"torch", "transformers", "onnx", "onnxruntime", "gguf", "huggingface_hub", "tensorrt", "websockets", "zmq"}
    heavy |= {"fastapi", "llguidance", "prometheus_client", "starlette", "uvicorn"}
    code = f"import sys, {module}; print(*sorted({heavy!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_files_stay_small() -> None:
    long = {
        path.relative_to(ROOT).as_posix(): lines
        for path in sources()
        if (lines := len(path.read_text().splitlines())) > LONGEST
    }
    assert not long, f"expected at most {LONGEST} lines: split them by role"


# Put together here, so that this file does not say what it looks for.
FORBIDDEN = {
    "a path of one machine": r"(?<![\w.~$})])/(?:" + "|".join(("work", "root", "home", "Users")) + r")/\w",
    "a package host": r"(?i)\b(?:" + "|".join(("pypi", "pythonhosted", "anaconda", "pytorch")) + r")\.(?:org|com|io)\b",
    "a package index": "(?:extra-)?" + "index" + "-url|find" + "-links",
}


def tracked() -> list[Path]:
    """Files that belong to the project; skips when the folder is no clone."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git clone")
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_names_a_machine() -> None:
    found = []
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for what, pattern in FORBIDDEN.items():
            for match in re.finditer(pattern, text):
                line = text.count("\n", 0, match.start()) + 1
                found.append(f"{path.relative_to(ROOT)}:{line}: {what}: {match.group()}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("a path of one machine", "cd " + "/" + "work/main"),
        ("a path of one machine", '"' + "/" + "home/ada/models" + '"'),
        ("a package host", "https://" + "pypi" + ".org/simple"),
        ("a package index", "pip install --" + "index" + "-url x"),
    ],
)
def test_machines_are_recognised(what: str, text: str) -> None:
    assert re.search(FORBIDDEN[what], text)


@pytest.mark.parametrize("text", ["rootfs/home/user", "~/.cache/starsd", "$HOME/w/x", "the edge/home/work"])
def test_other_paths_are_not(text: str) -> None:
    assert not re.search(FORBIDDEN["a path of one machine"], text)
