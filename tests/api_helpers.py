"""The API's server on a free port, in front of the toy target: real sockets, a real uvicorn, a model of a few lines."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from numpy.typing import NDArray
from tiny_session import EOS, TEMPLATE, VOCAB, ToyTarget, write_text_files

from starsd.edge.api import create_app
from starsd.edge.api_settings import Settings
from starsd.edge.runtime import Drafting, Runtime
from starsd.edge.text import Text
from starsd.shared.profiles import Profile

TOOL_TEMPLATE = (
    "{% if tools %}<s>tools{% for tool in tools %} {{ tool | tojson }}{% endfor %}</s>{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


class SlowTarget(ToyTarget):
    """Takes its time for each pass, and counts them, those of its siblings too."""

    pause = 0.02
    passes: list[float]

    def __init__(self, context: int = 4096, passes: list[float] | None = None) -> None:
        super().__init__(context)
        self.passes = [] if passes is None else passes

    def score(self, tokens: Any, parents: Any) -> NDArray[np.float32]:
        self.passes.append(time.monotonic())
        time.sleep(self.pause)
        return super().score(tokens, parents)

    def logits(self, context: Any) -> NDArray[np.float32]:
        logits = super().logits(context)
        logits[EOS] = -50
        return logits

    def sibling(self) -> SlowTarget:
        return type(self)(self.context, self.passes)


class ScriptedTarget(ToyTarget):
    """Behind the prompt's last "assistant: " it wants to say the first of `scripts`, else the next, and then to end."""

    text: Text
    scripts: tuple[str, ...] = ()

    def logits(self, context: Any) -> NDArray[np.float32]:
        said = self.text.tokenizer.decode(list(context), skip_special_tokens=False).rpartition("assistant: ")[2]
        logits = np.zeros(VOCAB, np.float32)
        for wish, script in zip((40, 20), self.scripts, strict=False):
            if script.startswith(said):
                rest = script[len(said) :]
                logits[self.text.encode(rest, add_special_tokens=False)[0] if rest else EOS] = wish
        return logits


def open_runtime(
    folder: Path,
    target: Callable[[int], ToyTarget] = ToyTarget,
    *,
    template: str = TEMPLATE,
    context: int = 4096,
    conversations: int = 8,
    drafting: Drafting | None = None,
    profile: Profile | None = None,
) -> Runtime:
    """A runtime whose model is a toy."""
    config = write_text_files(folder) / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": template}))
    text = Text.open(folder)
    ScriptedTarget.text = text
    about = {"name": "toy", "precision": "int8", "fingerprint": "f" * 64}
    drafting = drafting or Drafting()
    return Runtime.around(
        target(context), text=text, **about, conversations=conversations, drafting=drafting, profile=profile
    )


class Served:
    """Where a server is, what it serves, and what it wrote into its log."""

    def __init__(self, runtime: Runtime, app: Any, port: int, log: list[str]) -> None:
        self.runtime, self.app, self.port, self.log = runtime, app, port, log
        self.url = f"http://127.0.0.1:{port}"
        self.loop: asyncio.AbstractEventLoop | None = None

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, str], Any]:
        """Status, headers and what came: JSON where it is, else bytes. A body that is no bytes is sent as JSON."""
        sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            connection.request(method, path, sent, dict(headers or {}))
            answer = connection.getresponse()
            came = answer.read()
        told = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, told, json.loads(came) if "json" in told.get("content-type", "") else came

    def counted(self, name: str, **labels: str) -> float:
        """A figure of /metrics."""
        said = ",".join(f'{label}="{value}"' for label, value in labels.items())
        line = f"starsd_edge_{name}" + (f"{{{said}}} " if labels else " ")
        (found,) = (row for row in self.ask("GET", "/metrics")[2].decode().splitlines() if row.startswith(line))
        return float(found.removeprefix(line))

    def chat(self, **fields: Any) -> Any:
        """The answer to a chat request, which must succeed."""
        status, _, said = self.ask("POST", "/v1/chat/completions", fields)
        assert status == 200, said
        return said

    def stream(self, path: str = "/v1/chat/completions", **fields: Any) -> list[dict[str, Any]]:
        """The chunks of a streamed answer, which must end well."""
        status, headers, said = self.ask("POST", path, {**fields, "stream": True})
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8"), said
        *events, done, rest = said.decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        assert all(event.startswith("data: ") for event in events)
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def refused(self, path: str, body: Any, status: int, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The error of a request that must be refused so."""
        got, _, said = self.ask("POST", path, body, headers)
        assert got == status, said
        assert list(said) == ["error"]
        assert list(said["error"]) == ["message", "type", "param", "code"]
        return dict(said["error"])

    def end(self) -> None:
        """Set the app's `ending`, as run.py does when the time of grace is over."""
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self.app.state.ending.set)


@contextlib.contextmanager
def served(runtime: Runtime, settings: Settings | None = None, web: Path | None = None) -> Iterator[Served]:
    """Serve a runtime on a free port."""
    log: list[str] = []
    app = create_app(runtime, settings or Settings(), log=log.append, web=web or Path("nowhere"))
    listener = socket.create_server(("127.0.0.1", 0))
    quiet: dict[str, Any] = {"log_config": None, "access_log": False}
    config = uvicorn.Config(app, http="h11", lifespan="off", ws="none", timeout_graceful_shutdown=2, **quiet)
    server = uvicorn.Server(config)
    place = Served(runtime, app, listener.getsockname()[1], log)

    async def serve() -> None:
        place.loop = asyncio.get_running_loop()
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield place
    finally:
        server.should_exit = True
        thread.join(10)
        runtime.close()
    assert not thread.is_alive()


def wait_until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for something that other threads bring about."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
