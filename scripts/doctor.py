"""`starsd doctor`: what this machine has, what starsd would do with it, and what stands in the way."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import msgspec
import typer

from starsd.edge.target import open_target
from starsd.edge.telemetry_look import Look, describe, take_a_look
from starsd.scripts.agreement import Agreement
from starsd.scripts.self_test import SelfTest
from starsd.scripts.self_test import self_test as run_self_test
from starsd.shared import manifest
from starsd.shared.config import DEFAULT_MODEL, DEFAULT_PRECISION, Engine
from starsd.shared.console import StderrProgress, emit
from starsd.shared.errors import MissingExtraError, OutdatedBundleError, StarsdError
from starsd.shared.home import home, parse_ref
from starsd.shared.meminfo import meminfo

PYTHONS = ((3, 10), (3, 13))
NEEDED_DISK = 1_500_000_000  # bytes; the default model's download, its weights and one bundle
NEEDED_MEMORY = 1_000_000_000  # bytes; the default model in fp32 with its cache
EXTRAS = {  # modules that each extra brings
    "edge": (
        *("fastapi", "jinja2", "llguidance", "onnxruntime", "prometheus_client", "rich", "starlette", "threadpoolctl"),
        *("tokenizers", "uvicorn", "websockets"),
    ),
    "server": ("safetensors", "tokenizers", "torch", "websockets", "zmq"),
    "export": ("gguf", "huggingface_hub", "ml_dtypes", "onnx", "google.protobuf", "safetensors", "sentencepiece"),
}
CPU_FEATURES = (  # what integer and half-precision kernels ask for: x86, then Arm
    *("avx2", "f16c", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16"),
    *("asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)
DOT_PRODUCTS = {"avx_vnni", "avx512_vnni", "amx_int8", "asimddp", "i8mm"}
WHY = {  # a precision is the default because …
    "fp32": "nothing is rounded",
    "fp16": "half the bytes of fp32 are read for a token, almost nothing is lost",
    "int8": "a quarter of the bytes of fp32 are read for a token, and passes over a whole tree stay fast",
    "int4": "the fewest bytes are read for a token, which is what a step on a small device waits for",
}


class Problem(msgspec.Struct, frozen=True):
    """`broken`: something fails until it is remedied; otherwise something is slower or missing."""

    problem: str
    remedy: str
    broken: bool


class Bundle(msgspec.Struct, frozen=True):
    name: str  # as starsd models list shows it: model/flavour-precision
    precision: str
    bytes: int
    quality: manifest.Quality | None


class Report(msgspec.Struct, kw_only=True):
    """Everything the doctor saw; sizes in bytes, None where this system does not tell."""

    starsd: str
    python: str
    system: str
    cores: int
    cpu_features: list[str]
    memory: int | None
    memory_available: int | None
    home: str
    disk_free: int
    sensors: Look
    extras: dict[str, list[str]]  # modules that are missing of each
    versions: dict[str, str]
    onnxruntime_providers: list[str] | None
    default_precision: str
    default_precision_why: str
    bundles: list[Bundle]
    noise: float | None = None  # logits, of a trunk row; of the model asked for, measured here and now
    branch_noise: float | None = None  # the same behind the trunk
    self_test: SelfTest | None = None
    problems: list[Problem]


def doctor(
    model: Annotated[str | None, typer.Option(help="Also try whether this model runs.")] = None,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Also compare its engine with fp32, and time its passes: minutes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Show what this machine offers, and what to do about what is missing; status 1 when something is broken."""
    report = examine(model)
    if self_test:
        _test(report, model or DEFAULT_MODEL)
    (emit if as_json else _show)(report)
    if any(problem.broken for problem in report.problems):
        raise typer.Exit(1)


def examine(model: str | None = None) -> Report:
    """Look, without importing what is heavy (onnxruntime apart, when it is there) and without changing anything.

    Sensors are asked by a process of their own, which takes a second."""
    problems: list[Problem] = []
    features, memory = cpu_features(), meminfo()
    existing = next(place for place in (home(), *home().parents) if place.exists())
    report = Report(
        starsd=metadata.version("starsd"),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        cpu_features=features,
        memory=memory.get("MemTotal"),
        memory_available=memory.get("MemAvailable"),
        home=str(home()),
        disk_free=shutil.disk_usage(existing).free,
        sensors=take_a_look(),
        extras={extra: [name for name in modules if not has(name)] for extra, modules in EXTRAS.items()},
        versions=dict(_versions()),
        onnxruntime_providers=_providers(problems),
        default_precision=DEFAULT_PRECISION,
        default_precision_why=WHY[DEFAULT_PRECISION],
        bundles=list(_bundles(problems)),
        problems=problems,
    )
    problems += _machine_problems(report, existing)
    if model is not None:
        report.noise, report.branch_noise = _try_model(model, problems)
    return report


def has(module: str) -> bool:
    """Whether a module is installed, without importing it."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even its parent is
        return False


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Those of CPU_FEATURES that the first core has; none where the system does not tell."""
    if not cpuinfo.is_file():
        return []
    for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return [feature for feature in CPU_FEATURES if feature in value.split()]
    return []


def _versions() -> Iterator[tuple[str, str]]:
    for name in ("numpy", "msgspec", "typer", *(module for modules in EXTRAS.values() for module in modules)):
        distribution = {"google.protobuf": "protobuf"}.get(name, name)
        try:
            yield distribution, metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue


def _providers(problems: list[Problem]) -> list[str] | None:
    if not has("onnxruntime"):
        return None
    try:
        onnxruntime = import_module("onnxruntime")
    except Exception as error:  # a broken installation may raise anything
        problems.append(Problem(f"onnxruntime cannot be imported: {error}", "install it again", True))
        return None
    return list(onnxruntime.get_available_providers())


def _bundles(problems: list[Problem]) -> Iterator[Bundle]:
    for file in sorted((home() / "bundles").glob(f"[!.]*/[!.]*/{manifest.FILE_NAME}")):
        name = f"{file.parent.parent.name}/{file.parent.name}"
        try:
            found = manifest.read(file.parent)
        except OutdatedBundleError as error:
            problems.append(Problem(str(error), f"its next use does, or starsd models rm {name}", False))
            continue
        except StarsdError as error:
            problems.append(Problem(str(error), f"starsd models rm {name}, then export it again", True))
            continue
        size = sum(entry.bytes for entry in found.files.values())
        yield Bundle(name, found.precision, size, found.quality)


def _machine_problems(report: Report, existing: Path) -> Iterator[Problem]:
    oldest, newest = (".".join(map(str, version)) for version in PYTHONS)
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        yield Problem(f"python is {report.python}", f"use {oldest} to {newest}", True)
    if all(report.extras.values()):
        yield Problem("no extra is complete, so that no command can run", "pip install 'starsd[edge]'", True)
    elif missing := report.extras["edge"]:
        yield Problem(f"the edge cannot run here, it lacks {', '.join(missing)}", "pip install 'starsd[edge]'", False)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield Problem(f"{existing} is not a folder we may write", "set STARSD_HOME to one", True)
    if report.disk_free < NEEDED_DISK:
        room = f"{report.disk_free / 1e9:.1f} GB are free below {report.home}"
        yield Problem(f"{room}, {DEFAULT_MODEL} needs {NEEDED_DISK / 1e9}", "free some, or set STARSD_HOME", False)
    if report.memory_available is not None and report.memory_available < NEEDED_MEMORY:
        free = f"{report.memory_available / 1e9:.1f} GB of memory are available"
        yield Problem(f"{free}, {DEFAULT_MODEL} may need {NEEDED_MEMORY / 1e9}", "end other programs", False)
    if report.cpu_features and not DOT_PRODUCTS & set(report.cpu_features):
        yield Problem("this CPU has no integer dot products: int8 and int4 are slow", "try --precision fp32", False)


def _try_model(model: str, problems: list[Problem]) -> tuple[float | None, float | None]:
    """Check every byte of the model's bundle and open it; the noise its engine measures then."""
    folder = manifest.find(model)
    try:
        if folder is None:
            ref = parse_ref(model)
            folder = ref.bundle("ort", DEFAULT_PRECISION)
            if not (folder / manifest.FILE_NAME).is_file():
                if not (ref.folder / "config.json").is_file():
                    problems.append(Problem(f"{model} is not on this machine", f"starsd pull {quote(model)}", False))
                export = f"starsd-export onnx {quote(model)} --precision {DEFAULT_PRECISION}"
                problems.append(Problem(f"{model} has no bundle in {DEFAULT_PRECISION}", export, False))
                return None, None
        manifest.read(folder, verify=True)
        target = open_target("onnx", folder, Engine())
        return target.noise, target.branch_noise
    except MissingExtraError:
        return None, None  # said already
    except Exception as error:  # a doctor survives the patient
        problems.append(Problem(str(error), "give another model, or export this one again", True))
        return None, None


def _test(report: Report, model: str) -> None:
    try:
        report.self_test, complaint = run_self_test(model, StderrProgress())
    except StarsdError as error:
        report.problems.append(Problem(str(error), "then test again", True))
        return
    if complaint is not None:
        report.problems.append(Problem(complaint, "export its bundle again, and build its engine again", True))


def _agreed(found: Agreement) -> str:
    share = f"{100 * found.top1:.1f} % of argmaxes equal"
    return f"{share}, KL {found.kl:.4f}, logits within {found.largest:.2g}"


def _show(report: Report) -> None:
    def line(name: str, value: Any) -> None:
        typer.echo(f"{name:12} {value}")

    line("starsd", f"{report.starsd}, python {report.python}, {report.system}")
    line("cpu", f"{report.cores} usable, {' '.join(report.cpu_features) or 'features unknown'}")
    if report.memory is not None and report.memory_available is not None:
        line("memory", f"{report.memory_available / 1e9:.1f} of {report.memory / 1e9:.1f} GB available")
    line("sensors", report.sensors.reading.source or "none")
    for name, value in describe(report.sensors):
        line(name, value)
    line("home", f"{report.home}, {report.disk_free / 1e9:.1f} GB free")
    for extra, missing in report.extras.items():
        line(extra, f"lacks {', '.join(missing)}" if missing else "installed")
    line("libraries", " ".join(f"{name} {version}" for name, version in report.versions.items()))
    if report.onnxruntime_providers is not None:
        line("onnxruntime", ", ".join(report.onnxruntime_providers))
    line("precision", f"{report.default_precision} unless asked for another: {report.default_precision_why}")
    for bundle in report.bundles:
        told = [f"{bundle.bytes / 1e6:.0f} MB"]
        if bundle.quality:
            told.append(f"top-1 {100 * bundle.quality.top1:.1f} % and KL {bundle.quality.kl:.4f} against fp32")
        line("bundle", f"{bundle.name}, {', '.join(told)}")
    if report.noise is not None:
        line("model", f"runs; noise {report.noise:.2g} logits on the trunk, {report.branch_noise:.2g} on branches")
    if (test := report.self_test) is not None:
        line("self-test", f"{test.bundle} on {'TensorRT' if test.tensorrt else f'ONNX Runtime: {test.why_not}'}")
        line("against fp32", f"{_agreed(test)}, over {test.tokens} tokens")
        line("rows: ms", ", ".join(f"{rows}: {ms:.1f}" for rows, ms in test.pass_ms))
        line("profile", f"{test.profile}, prompts at {test.prefill_tok_s:.0f} tokens a second")
        for found in test.providers:
            graphs = "with CUDA graphs" if found.cuda_graphs else "without CUDA graphs"
            line("provider", f"{found.provider}, {graphs}: {found.bundle}, {_agreed(found)}")
        for name, reason in test.skipped.items():
            line("skipped", f"provider {name}: {reason}")
    for problem in report.problems:
        line("BROKEN" if problem.broken else "note", f"{problem.problem}: {problem.remedy}")
    if not report.problems:
        line("problems", "none")
