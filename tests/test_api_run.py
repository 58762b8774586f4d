"""`starsd-edge run`, as people start and end it; and the default model behind it."""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from tiny_model import export, write_folder
from tiny_session import EOS

from starsd.edge import run as command
from starsd.edge.api_settings import Settings, read_keys, recommended
from starsd.edge.cli import main
from starsd.edge.policy import Policy
from starsd.edge.runtime import Drafting
from starsd.edge.telemetry import Telemetry
from starsd.edge.telemetry_process import ProcessTelemetry
from starsd.shared.config import Engine, Sampling
from starsd.shared.errors import ModelError, UsageError

KEY = "a-key-of-some-length"
ASKED: Any = [{"role": "user", "content": "Is this so?"}]
ENDLESS = {str(EOS): -100, "2": -100}  # the second is what transformers takes an end token to be


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tiny")
    return export(write_folder(place / "model", max_position_embeddings=4096), place / "bundle")


class Server:
    """`starsd-edge run` in a process of its own, once it is ready."""

    def __init__(self, *argv: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "starsd.edge.cli", "run", "--port", "0", "--json", *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "STARSD_API_KEY": ""},
        )
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said, self.process.communicate()[1]
        self.ready = json.loads(said)
        self.url, self.model = self.ready["url"], self.ready["model"]

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Exit status, and all that it wrote on stderr."""
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=30)
        return self.process.returncode, err


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def started(*argv: str) -> Server:
        servers.append(Server(*argv))
        return servers[-1]

    yield started
    for server in servers:
        server.process.kill()
        server.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_from_start_to_end(bundle: Path, start: Callable[..., Server], number: signal.Signals) -> None:
    server = start("--model", str(bundle), "--threads", "1")
    port = server.ready["port"]
    url = f"http://127.0.0.1:{port}"
    assert server.ready == {"event": "ready", "host": "127.0.0.1", "port": port, "url": url, "model": server.model}
    assert server.model.startswith("model-")
    with server.client() as client:
        fields: Any = {"model": server.model, "messages": ASKED, "seed": 5, "max_tokens": 20}
        answer = client.chat.completions.create(**fields, temperature=0.9, top_p=0.9)
    status, err = server.end(number)
    assert status == 0
    lines = err.splitlines()
    assert lines[0] == f"starsd-edge: ready at {server.url}"
    assert lines[1].split()[2:5] == ["POST", "/v1/chat/completions", "200"]
    assert len(lines) == 2
    argv = ["generate", "--model", str(bundle), "--prompt", "Is this so?", "--json", "--threads", "1"]
    argv += ["--seed", "5", "--max-new-tokens", "20", "--temperature", "0.9", "--top-p", "0.9"]
    done = subprocess.run([sys.executable, "-m", "starsd.edge.cli", *argv], capture_output=True, text=True, check=True)
    assert answer.choices[0].message.content == json.loads(done.stdout)["text"]


def streaming(server: Server, tokens: int, answers: int = 1) -> tuple[threading.Thread, queue.Queue[str]]:
    """A stream that is under way; the queue gets what ended it."""
    ended: queue.Queue[str] = queue.Queue()
    begun = threading.Event()

    def read() -> None:
        fields: Any = {"model": server.model, "messages": ASKED, "max_tokens": tokens, "n": answers}
        fields |= {"logit_bias": ENDLESS}
        finish = ""
        try:
            with server.client() as client:
                for chunk in client.chat.completions.create(**fields, stream=True):
                    begun.set()
                    finish = chunk.choices[0].finish_reason or ""
            ended.put(finish)
        except openai.APIError as error:
            ended.put(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(30)
    return thread, ended


def test_answers_under_way_get_their_time(bundle: Path, start: Callable[..., Server]) -> None:
    server = start("--model", str(bundle), "--grace", "60")
    thread, ended = streaming(server, 300)
    status, _ = server.end()
    thread.join()
    assert (status, ended.get(timeout=10)) == (0, "length")


@pytest.mark.parametrize(("grace", "signals"), [("0.2", 1), ("60", 2)])
def test_and_no_more_than_that(bundle: Path, start: Callable[..., Server], grace: str, signals: int) -> None:
    server = start("--model", str(bundle), "--grace", grace)
    thread, ended = streaming(server, 4000, answers=16)
    for _ in range(signals - 1):
        server.process.send_signal(signal.SIGINT)
        with pytest.raises(queue.Empty):
            ended.get(timeout=0.5)
    status, err = server.end()
    thread.join()
    assert status == 0, err
    assert ended.get(timeout=10) == "the server is ending, expected to be asked again later"
    assert "Traceback" not in err


def test_a_key_file(bundle: Path, start: Callable[..., Server], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"# of our apps\n\n{KEY}\n")
    server = start("--model", str(bundle), "--api-key-file", str(keys), "--host", "0.0.0.0")
    connection = http.client.HTTPConnection("127.0.0.1", server.ready["port"], timeout=10)
    for header, wanted in (({}, 401), ({"Authorization": f"Bearer {KEY}", "Host": "device.example"}, 200)):
        connection.request("GET", "/v1/models", headers=header)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == wanted
    connection.close()


def fails(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line of a command that fails before it looks for the model."""
    assert main(["run", "--model", "no-such-model", *argv]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("starsd-edge: ")
    assert err.count("\n") == 1
    return err.removeprefix("starsd-edge: ").rstrip("\n")


def test_what_cannot_be_served_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("STARSD_API_KEY", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = fails(capsys, "--port", port)
    assert said == (
        f"cannot listen on 127.0.0.1 port {port}: Address already in use: something listens there already, "
        "give another --port"
    )
    assert fails(capsys, "--host", "0.0.0.0") == (
        "--host 0.0.0.0 lets other machines in, expected an API key: "
        "give --api-key-file FILE or set STARSD_API_KEY, or listen on 127.0.0.1"
    )
    assert fails(capsys, "--port", "70000") == "port is 70000, expected 0 to 65535"
    assert fails(capsys, "--host", "no.such.host.invalid", "--api-key-file", str(key_file(tmp_path))).startswith(
        "cannot listen on no.such.host.invalid: "
    )
    assert fails(capsys, "--conversations", "0") == "conversations is 0, expected 1 or more"
    assert fails(capsys, "--queue", "-1") == "queue is -1, expected 0 or more"
    assert fails(capsys, "--grace", "nan") == "grace is nan, expected 0 or more"
    assert fails(capsys, "--allow-origin", "app.example") == (
        "allowed origin is 'app.example', expected the like of https://app.example, or *"
    )
    assert fails(capsys, "--port", "0").startswith("model 'no-such-model' is unknown")


def key_file(folder: Path) -> Path:
    path = folder / "keys"
    path.write_text(KEY)
    return path


def test_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STARSD_API_KEY", f" {KEY}-2 ")
    assert read_keys(key_file(tmp_path)) == (f"{KEY}-2", KEY)
    monkeypatch.delenv("STARSD_API_KEY")
    assert read_keys(None) == ()
    path = tmp_path / "bad"
    for content, message in (
        ("\n# none\n", f"key file {path} holds no key, expected one a line"),
        ("short", "an API key has 5 characters, expected 16 or more, of printable ASCII, no spaces"),
        ("a key with spaces in it", "an API key has 23 characters, expected 16 or more"),
        ("ein-Schlüssel-mit-ü", "an API key has 19 characters, expected 16 or more"),
    ):
        path.write_text(content)
        with pytest.raises(UsageError) as refused:
            read_keys(path)
        assert str(refused.value).startswith(message)
    with pytest.raises(UsageError, match=r"key file .*missing cannot be read"):
        read_keys(tmp_path / "missing")


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (None, Sampling(temperature=0.8, top_p=0.95)),
        ({"eos_token_id": 2}, Sampling(temperature=0.8, top_p=0.95)),
        ({"do_sample": False, "temperature": 0.3}, Sampling(temperature=0.8, top_p=0.95)),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9},
            Sampling(temperature=0.6, top_k=20, top_p=0.9),
        ),
        (
            {"top_p": 0.9, "repetition_penalty": 1.1, "min_p": None},
            Sampling(temperature=1, top_p=0.9, repetition_penalty=1.1),
        ),
    ],
)
def test_how_a_model_wants_to_be_sampled(tmp_path: Path, config: dict[str, Any] | None, wanted: Sampling) -> None:
    if config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert recommended(tmp_path, Settings().sampling) == wanted


@pytest.mark.parametrize("content", ["[", "[]", '{"temperature": "warm"}'])
def test_a_broken_generation_config_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"generation_config\.json cannot be read: "):
        recommended(tmp_path, Settings().sampling)


def test_every_option_arrives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("STARSD_API_KEY", raising=False)
    monkeypatch.delenv("STARSD_TOKEN", raising=False)
    seen: list[Any] = []
    monkeypatch.setattr(command, "run", lambda *given, **named: seen.append((given, named)))
    argv = ["run", "--model", "m", "--precision", "int4", "--host", "::1", "--port", "9", "--server", "ws://x"]
    argv += ["--policy", "stop-and-wait", "--codec", "int4", "--conversations", "3", "--queue", "5", "--grace", "1.5"]
    argv += ["--api-key-file", str(key_file(tmp_path)), "--allow-origin", "https://a.example", "--allow-origin", "*"]
    assert main([*argv, "--max-context", "99", "--threads", "2", "--no-telemetry", "--json"]) == 0
    assert main(["run"]) == 0
    settings = Settings(host="::1", port=9, conversations=3, queue=5, grace=1.5, keys=(KEY,))
    settings = msgspec.structs.replace(settings, origins=("https://a.example", "*"))
    drafting = Drafting(policy=Policy.STOP_AND_WAIT, server="ws://x", codec="int4")
    engine = Engine(max_context=99, threads=2)
    (given, named), (defaults, plain) = seen
    assert (named.pop("telemetry"), plain.pop("telemetry")) == (Telemetry, ProcessTelemetry)
    assert given == ("m", "int4")
    assert named == {"engine": engine, "drafting": drafting, "settings": settings, "as_json": True}
    assert defaults == ("smollm2-135m", None)
    assert plain == {"engine": Engine(), "drafting": Drafting(), "settings": Settings(), "as_json": False}


@pytest.mark.model
def test_the_default_model_answers(smollm2_bundle: Callable[[str], Path], start: Callable[..., Server]) -> None:
    smollm2_bundle("int4")
    server = start("--precision", "int4")
    assert server.ready["model"] == "smollm2-135m"
    question: Any = [{"role": "user", "content": "Name the capital of France, as JSON."}]
    schema = {"type": "object", "properties": {"capital": {"type": "string"}}, "required": ["capital"]}
    wanted: Any = {
        "type": "json_schema",
        "json_schema": {"name": "capital", "schema": {**schema, "additionalProperties": False}},
    }
    with server.client() as client:
        fields: Any = {"model": "smollm2-135m", "messages": question, "temperature": 0, "max_tokens": 60}
        said = client.chat.completions.create(**fields, response_format=wanted).choices[0]
        assert said.finish_reason == "stop"
        assert json.loads(said.message.content or "") == {"capital": "Paris"}
        plain = client.chat.completions.create(**{**fields, "max_tokens": 16})
        with pytest.raises(openai.BadRequestError, match="this model cannot call tools"):
            client.chat.completions.create(**fields, tools=[{"type": "function", "function": {"name": "x"}}])
    argv = ["generate", "--precision", "int4", "--prompt", question[0]["content"], "--max-new-tokens", "16", "--json"]
    done = subprocess.run([sys.executable, "-m", "starsd.edge.cli", *argv], capture_output=True, text=True, check=True)
    assert plain.choices[0].message.content == json.loads(done.stdout)["text"]
    assert server.end()[0] == 0
