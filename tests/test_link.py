"""The shell around a channel, against real servers: connecting, pumping, refusals, projectors, the end."""

from __future__ import annotations

import errno
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bigram_server import serving
from paced import Talk
from server_helpers import VOCAB, WIDTH, running, write_models
from star import MODEL, PROMPT
from tiny_session import write_text_files
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

from starsd.edge import link as edge_link
from starsd.edge import projectors
from starsd.edge.channel import Model
from starsd.edge.link import Link
from starsd.edge.remote import RemoteSession
from starsd.edge.text import Text
from starsd.server.link import ModelHead
from starsd.shared.errors import UsageError
from starsd.shared.manifest import FeatureSpec, ModelShape
from starsd.shared.messages import Error, HeadInfo, Hello, Open, Welcome
from starsd.shared.protocol import Connection, Role

Talking = Callable[[ServerConnection], None]


@contextmanager
def server(talk: Talking, port: int = 0, **options: Any) -> Iterator[str]:
    """A WebSocket server; its address."""

    def quietly(connection: ServerConnection) -> None:
        with suppress(ConnectionClosed):
            talk(connection)

    with serve(quietly, "127.0.0.1", port, compression=None, **options) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        try:
            yield f"ws://127.0.0.1:{made.socket.getsockname()[1]}"
        finally:
            made.shutdown()
            thread.join()


@contextmanager
def linked(url: str, **options: Any) -> Iterator[Link]:
    link = Link(url, **{"client": "edge 1.0", "codec_name": "fp16", "window": 64} | options)
    try:
        yield link
    finally:
        link.close()


def wait_for(check: Callable[[], object], seconds: float = 20.0) -> float:
    """Seconds that it took."""
    began = time.monotonic()
    while not check():
        assert time.monotonic() < began + seconds, "did not happen in time"
        time.sleep(0.005)
    return time.monotonic() - began


def greet(connection: ServerConnection, heads: tuple[HeadInfo, ...] = ()) -> Connection:
    ours = Connection(Role.SERVER)
    assert ours.receive(connection.recv()) == Hello(2, 2, "edge 1.0")  # type: ignore[arg-type]
    connection.send(ours.send(Welcome(2, "server", heads, 9, 1 << 20)))
    return ours


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("http://x", {}, "server is 'http://x', expected ws://host:port or wss://host:port"),
        ("ws://", {}, "server is 'ws://', expected ws://host:port or wss://host:port"),
        ("ws://localhost:99999", {}, "server is 'ws://localhost:99999', expected ws://host:port or wss://host:port"),
        ("ws://localhost:abc", {}, "server is 'ws://localhost:abc', expected ws://host:port or wss://host:port"),
        ("ws://[::1", {}, "server is 'ws://[::1', expected ws://host:port or wss://host:port"),
        ("wss://x", {"token": "a\nb"}, "token has spaces, line ends or other characters that no token has"),
        ("ws://10.0.0.1:1", {"token": "t"}, "server is 'ws://10.0.0.1:1', expected wss:// where a token is sent"),
        ("wss://x", {"trust": Path("nowhere.pem")}, "certificates in nowhere.pem cannot be read: "),
    ],
)
def test_addresses_are_checked_at_once(url: str, options: Any, message: str) -> None:
    with pytest.raises(UsageError) as found:
        Link(url, client="x", **options)
    assert str(found.value).startswith(message)


def test_the_token_goes_with_the_request() -> None:
    heard: list[str | None] = []

    def talk(connection: ServerConnection) -> None:
        assert connection.request is not None
        heard.append(connection.request.headers.get("Authorization"))
        greet(connection)
        connection.recv()

    with server(talk) as url, linked(url, token="secret") as link:
        wait_for(lambda: link.connected)
    with server(talk) as url, linked(url) as link:
        wait_for(lambda: link.connected)
    assert heard == ["Bearer secret", None]


def test_a_server_that_refuses_is_asked_again_in_peace() -> None:
    asked: list[float] = []

    def refuse(connection: ServerConnection, request: object) -> Any:
        asked.append(time.monotonic())
        return connection.respond(401, "unknown token\n")

    with server(lambda connection: None, process_request=refuse) as url, linked(url) as link:
        wait_for(lambda: len(asked) == 2)
        assert (link.connected, link.reconnects) == (False, -1)
        refusal = "server rejected WebSocket connection: HTTP 401"
        hint = "the server wants a token that it knows, see --token-file"
        assert link.channel.notice == f"server at {url} refuses us: {refusal} ({hint})"
    assert 0.45 < asked[1] - asked[0] < 2


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        ("text", "server sent text, expected binary frames"),
        (b"", "frame is empty, expected a tag"),
        (b"\x7f", "frame has tag 0x7f, expected one of "),
    ],
)
def test_nonsense_ends_the_connection(frame: str | bytes, reason: str) -> None:
    times: list[float] = []

    def talk(connection: ServerConnection) -> None:
        times.append(time.monotonic())
        greet(connection)
        connection.send(frame)
        connection.recv()

    with server(talk) as url, linked(url) as link:
        wait_for(lambda: link.channel.notice)
        assert link.channel.notice.startswith(reason)
        wait_for(lambda: len(times) == 2)
    assert times[1] - times[0] > 0.45


def test_a_server_that_hangs_up_is_not_hammered() -> None:
    times: list[float] = []
    with server(lambda connection: times.append(time.monotonic())) as url, linked(url):
        time.sleep(2.5)
    assert 3 < len(times) < 9


def test_a_server_that_answers_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_link, "HELLO_SECONDS", 0.2)
    times: list[float] = []

    def mute(connection: ServerConnection) -> None:
        times.append(time.monotonic())
        while True:
            connection.recv()

    with server(mute) as url, linked(url) as link:
        wait_for(lambda: len(times) == 2)
        assert link.channel.notice == "server did not answer hello in 0.2 seconds"


def test_nobody_there_and_then_somebody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    with linked(f"ws://127.0.0.1:{port}") as link:
        wait_for(lambda: link.channel.notice)
        assert link.channel.notice.startswith(f"no server at {link.url}: ")
        for number in range(2):
            with server(lambda connection: (greet(connection), connection.recv())[0], port):  # type: ignore[arg-type]
                assert wait_for(lambda: link.connected) < 1.5
                assert link.channel.notice == ""
                assert link.reconnects == number
            wait_for(lambda: not link.connected)


def test_what_a_session_says_goes_out_at_once() -> None:
    head = HeadInfo(MODEL.fingerprint, "ab" * 8, "bigram")
    heard: list[Any] = []

    def talk(connection: ServerConnection) -> None:
        ours = greet(connection, (head,))
        while True:
            message = ours.receive(connection.recv())  # type: ignore[arg-type]
            heard.append((time.monotonic(), message))
            if isinstance(message, Open):
                connection.send(ours.send(Error(message.session, "full", 0.0)))

    with server(talk) as url, linked(url) as link:
        wait_for(lambda: link.connected)
        asked = time.monotonic()
        link.channel.session(MODEL)
        wait_for(lambda: heard)
        assert heard[0][0] - asked < 0.2
        assert isinstance(heard[0][1], Open)
        wait_for(lambda: len(heard) == 2)  # though nothing wakes it
        assert 0.45 < heard[1][0] - heard[0][0] < 2


def test_closing_takes_no_longer_than_it_may() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        link = Link(f"ws://127.0.0.1:{mute.getsockname()[1]}", client="x")
        time.sleep(0.1)
        began = time.monotonic()
        link.close(0.3)
        assert time.monotonic() - began < 1
        session = link.channel.session(MODEL)  # and what comes after it changes nothing
        session.begin([1, 2], 0)
        session.commit([3])
        assert session.drafts(0.0) == []
        link.close()


def test_several_conversations_on_one_link(tmp_path: Path) -> None:
    text = Text.open(write_text_files(tmp_path))
    with serving() as (_, url, drafter), linked(url) as link:
        talks = [Talk(text, link, [*PROMPT, number]) for number in range(3)]
        time.sleep(2.0)
        for talk in talks:
            talk.end()
            assert talk.session.speculator.counts.remote > 0.3 * len(talk.ids)
        assert {talk.remote.number for talk in talks if talk.remote} == {1, 2, 3}
        free = len(drafter.free)
        for talk in talks:
            assert talk.remote is not None
            talk.remote.close()
        wait_for(lambda: len(drafter.free) == free + 3)
        assert not drafter.wrong


# projectors


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelHead:
    return write_models(tmp_path_factory.mktemp("models"))


def drafted_for(link: Link) -> RemoteSession:
    """A session for the tiny head, with a text."""
    wait_for(lambda: link.connected)
    (head,) = link.channel._heads.values()
    shape = ModelShape(layers=1, hidden=WIDTH // 3, heads=1, kv_heads=1, head_dim=1, vocab=VOCAB, context=64)
    session = link.channel.session(Model(head.fingerprint, shape, FeatureSpec((0, 1, 2), False, WIDTH // 3)))
    assert session._width == WIDTH
    session.begin(list(range(20)), 0)
    session.features(0, np.random.default_rng(1).standard_normal((19, WIDTH), np.float32))
    return session


def nodes(session: RemoteSession) -> int:
    return sum(len(draft.tokens) for draft in session.drafts(0.05))


def test_a_projector_is_fetched_used_and_kept(model: ModelHead, starsd_home: Path) -> None:
    with running(model) as (gateway, url):
        with linked(url) as link:
            session = drafted_for(link)
            wait_for(lambda: session.live and session.sent_width < WIDTH)
            wait_for(lambda: nodes(session))
        (file,) = (starsd_home / "projectors").iterdir()
        assert file.stat().st_size == gateway.heads()[0].projector_bytes
        changed = file.stat().st_mtime_ns
        with linked(url) as link:
            session = drafted_for(link)
            wait_for(lambda: nodes(session))
            assert session.number == 1  # with it from the beginning
            assert file.stat().st_mtime_ns == changed


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("trouble", ["disk full", "home is a file", "another size", "no projector", "gone"])
def test_without_a_projector_features_go_as_they_are(
    model: ModelHead, starsd_home: Path, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    crashed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", crashed.append)
    answer = projectors.ProjectorStore._download

    def download(self: projectors.ProjectorStore, head: HeadInfo, file: Path) -> None:
        if trouble == "another size":
            head = HeadInfo(head.fingerprint, head.head, head.model, head.projector_bytes - 1)
        if trouble == "no projector":
            monkeypatch.setattr(Path, "write_bytes", lambda path, data: path.open("wb").write(bytes(len(data))))
        if trouble == "gone":
            head = HeadInfo(head.fingerprint, "0" * 16, head.model, head.projector_bytes)
        answer(self, head, file)
        asked.append(head)

    monkeypatch.setattr(projectors.ProjectorStore, "_download", download)
    if trouble == "disk full":
        monkeypatch.setattr(Path, "write_bytes", full)
    if trouble == "home is a file":
        starsd_home.write_text("")
    with running(model) as (_, url), linked(url) as link:
        session = drafted_for(link)
        wait_for(lambda: asked)
        wait_for(lambda: nodes(session))
        assert (session.sent_width, session.number) == (WIDTH, 1)
        drafted_for(link)
        time.sleep(0.2)
        assert len(asked) == 1  # it is not fetched for every session
    assert not crashed
    assert not starsd_home.is_dir() or not list((starsd_home / "projectors").glob("*"))


@pytest.mark.parametrize("shape", ["[1000000, 1000000]", "[-1, 4]", "[2]", '["a"]'])
def test_a_projector_that_lies_about_its_size(starsd_home: Path, shape: str) -> None:
    header = b'{"fc.weight": {"dtype": "F32", "shape": %s, "data_offsets": [0, 32]}}' % shape.encode()
    folder = starsd_home / "projectors"
    folder.mkdir(parents=True)
    (folder / f"{'ab' * 8}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(32))
    store = projectors.ProjectorStore("ws://127.0.0.1:1", "", None, lambda: None)
    assert store(HeadInfo("f", "ab" * 8, "tiny", 100)) is None
    assert store(HeadInfo("f", "../../etc", "tiny", 100)) is None
    assert store(HeadInfo("f", "ab" * 8, "tiny", 1 << 40)) is None


def test_certificates_are_checked() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with server(lambda connection: None, ssl=context) as url:
        there = url.replace("ws://", "wss://")
        with linked(there) as link:
            wait_for(lambda: link.channel.notice)
            assert link.channel.notice.startswith(f"no server at {there}: ")
            assert not link.connected
