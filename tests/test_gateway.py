"""A whole server on real sockets: what edges get, and what becomes of those that misbehave or vanish."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from head_builder import base_config, random_tensors, write_head
from server_helpers import SMALL, WIDTH, Edge, best_paths, command, eventually, opening, running, text, write_models
from websockets.exceptions import ConnectionClosed, InvalidStatus

from starsd.edge.projector import Projector
from starsd.server.auth import add_token, read_tokens
from starsd.server.batch import BatchDrafter
from starsd.server.eagle_heads import load_head
from starsd.server.eagle_layer import EagleLayer
from starsd.server.gateway import Gateway
from starsd.server.link import RELOAD, ROLLBACK, ModelHead
from starsd.server.scheduler import tree_nodes
from starsd.shared.messages import Ack, Close, Draft, Error, Features, Hello, Open, Prefix, Stats, Verdict
from starsd.shared.protocol import SessionState

Server = tuple[Gateway, str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelHead:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def drafter(model: ModelHead) -> BatchDrafter:
    return BatchDrafter(EagleLayer(load_head(model.head, model.model)), SMALL.slot_limits, SMALL.tree)


@pytest.fixture(scope="module")
def server(model: ModelHead) -> Iterator[Server]:
    with running(model) as found:
        yield found


@pytest.fixture
def edge(server: Server) -> Iterator[Edge]:
    made = Edge(server[1])
    yield made
    made.close()
    eventually(lambda: health(server[1])["connections"] == 0)


def health(url: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(url.replace("ws://", "http://") + "/health") as answer:
            found: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as refused:
        found = {"code": refused.code, **json.load(refused)}
    return found


def serve_text(edge: Edge, drafter: BatchDrafter, session: int, count: int, seed: int) -> None:
    """A prompt and its tree, two verdicts inside it and one outside, with their features: all trees as they must be."""
    features = edge.prompt(session, count, seed)
    receiver = edge.receivers[session]
    edge.rest(session, best_paths(drafter, np.array(receiver.tokens), features, SMALL.nodes))
    for seq in range(1, 4):
        base = len(receiver.tokens)
        path = max(receiver.below(base), key=len)[:3] if seq < 3 else (seed % 7,)
        _, data, more = text(len(path), seed + seq)
        edge.say(Verdict(session, 1, seq, base, len(receiver.paths), 0, np.array(path)))
        edge.say(Features(session, 1, base - 1, data))
        features = np.concatenate([features, more])
        edge.rest(session, best_paths(drafter, np.array(receiver.tokens), features, SMALL.nodes))


def test_drafts_are_those_of_the_session_itself(edge: Edge, drafter: BatchDrafter) -> None:
    opened = edge.open()
    assert (opened.width, opened.window, opened.max_nodes) == (WIDTH, SMALL.window, SMALL.max_nodes)
    assert opened.head == edge.welcome.heads[0].head
    assert (edge.welcome.max_sessions, edge.welcome.max_message) == (SMALL.sessions, SMALL.max_message)
    serve_text(edge, drafter, 1, 20, 3)


def test_two_connections_with_equal_numbers(server: Server, edge: Edge, drafter: BatchDrafter) -> None:
    other = Edge(server[1])
    for one in (edge, other):
        one.open()
    serve_text(other, drafter, 1, 15, 5)
    serve_text(edge, drafter, 1, 10, 9)
    other.say(Close(1))
    other.close()
    edge.say(Prefix(1, 2, 0, text(9, 2)[0]), Features(1, 2, 0, text(9, 2)[1]))
    edge.rest(1, best_paths(drafter, text(9, 2)[0], text(9, 2)[2], SMALL.nodes))


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (bytes([0x11, 1, 0, 1, *bytes(21)]), "verdict has "),
        (bytes([0x12, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 9]), "features"),
        (bytes([0x13, 1, 0]) + bytes(40), "edge sent draft while session 1 is active, expected"),
    ],
)
def test_malformed_frames_end_their_own_session(edge: Edge, drafter: BatchDrafter, frame: bytes, reason: str) -> None:
    for number in (1, 2):
        edge.open(number)
        edge.prompt(number, 12, number)
    edge.say_raw(frame)
    error = edge.expect(Error)
    assert error.session == 1
    assert error.message.startswith(reason)
    assert edge.connection.state_of(2) is SessionState.ACTIVE
    edge.rest(2, best_paths(drafter, *text(12, 2)[::2], SMALL.nodes))
    edge.say_raw(bytes([0x11, 7, 0]) + bytes(24))  # of a session that never was
    edge.open(1)  # the number is free again
    edge.say(Close(1))
    assert edge.connection.closing == (1,)
    edge.open(1)  # and again, the answer to Close being under way
    edge.open(3)
    assert edge.connection.closing == ()


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"", "frame is empty, expected a tag"),
        (bytes([0x11, 1, 0]), "verdict takes 3 bytes, expected at least 25"),
        (b"\xff", "frame has tag 0xff, expected one of"),
        (
            bytes([0x01]) + msgspec.msgpack.encode({"type": "hello", "lowest": 1, "highest": 1, "client": ""}),
            "edge sent",
        ),
        ("{}", "frame is text, expected binary"),
    ],
)
def test_what_belongs_to_no_session_ends_the_connection(server: Server, frame: str | bytes, reason: str) -> None:
    edge = Edge(server[1])
    edge.open()
    edge.say_raw(frame)
    error = edge.expect(Error)
    assert (error.session, error.retry_after) == (0, -1.0)
    assert error.message.startswith(reason)
    with pytest.raises(ConnectionClosed):
        edge.socket.recv(5)
    edge.close()
    eventually(lambda: health(server[1])["sessions"] == 0)


def test_large_frames_are_not_even_read(server: Server) -> None:
    edge = Edge(server[1])
    edge.say_raw(bytes([0x10]) + bytes(SMALL.max_message))
    with pytest.raises(ConnectionClosed, match="1009"):
        edge.expect(Error)
    edge.close()


def test_versions_that_nobody_speaks_are_refused_politely(server: Server) -> None:
    edge = Edge(server[1], hello=False)
    frame = edge.connection.send(Hello(2, 2, "x"))
    edge.say_raw(bytes([frame[0]]) + msgspec.msgpack.encode(Hello(8, 9, "future")))
    assert edge.expect(Error).message == "client speaks protocol 8 to 9, expected 2 to 2: update the server"
    edge.close()


def test_connections_that_say_nothing_are_closed(model: ModelHead) -> None:
    with running(model, msgspec.structs.replace(SMALL, hello_seconds=0.1)) as (_, url):
        edge = Edge(url, hello=False)
        assert edge.expect(Error).message == "nothing came in 0.1 seconds, expected hello"
        edge.close()


def test_bytes_that_were_read_are_acknowledged(edge: Edge) -> None:
    edge.open()
    edge.prompt(1, 40, 1)
    sent = edge.connection.sent_bytes
    assert sent > 5000
    eventually(lambda: edge.expect(Ack).received == sent)


def test_the_last_slot_is_refused_and_may_be_tried_again(server: Server, edge: Edge) -> None:
    other = Edge(server[1])
    for number in range(1, SMALL.slots + 1):
        other.open(number)
    edge.say(msgspec.structs.replace(opening_of(edge), session=9))
    error = edge.expect(Error)
    assert error.message == "all 6 drafter slots are taken: close a session or raise the limit"
    assert (error.session, error.retry_after) == (9, SMALL.retry_seconds)
    other.say(Close(2))
    edge.open(10)
    other.close()


def opening_of(edge: Edge) -> Open:
    return opening(fingerprint=edge.welcome.heads[0].fingerprint)


CLIENT = """
from websockets.sync.client import connect
from starsd.shared.messages import Hello, Open
from starsd.shared.protocol import Connection, Role
connection = Connection(Role.EDGE)
with connect({url!r}, compression=None) as socket:
    socket.send(connection.send(Hello(2, 2, "client")))
    connection.receive(socket.recv())
    for number in range(1, 7):
        socket.send(connection.send(Open(number, {fingerprint!r}, 96, "fp16")))
        connection.receive(socket.recv())
    print("open", flush=True)
    while True:
        socket.recv()
"""


def test_slots_of_a_killed_client_are_free_within_a_second(server: Server, edge: Edge) -> None:
    code = CLIENT.format(url=server[1], fingerprint=edge.welcome.heads[0].fingerprint)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "open\n"
        assert health(server[1])["sessions"] == 6
        client.kill()
        seconds = eventually(lambda: health(server[1])["sessions"] == 0)
    for number in range(1, SMALL.slots + 1):
        edge.open(number)
    assert seconds < 1


def test_many_sessions_are_all_served(model: ModelHead, drafter: BatchDrafter) -> None:
    limits = msgspec.structs.replace(SMALL, slots=64, rows_per_pass=64, full_trees=48)
    nodes = tree_nodes(64, limits)
    assert nodes == 18  # smaller trees come before refusals
    with running(model, limits) as (_, url):
        edges = [Edge(url) for _ in range(4)]
        sessions = [(one, number) for one in edges for number in range(1, 17)]
        for one, number in sessions:
            one.open(number)
        for seed, (one, number) in enumerate(sessions):
            one.prompt(number, 8, seed)
        for seed, (one, number) in enumerate(sessions):
            one.rest(number, best_paths(drafter, *text(8, seed)[::2], nodes))
        for seq in range(1, 4):
            for seed, (one, number) in enumerate(sessions):
                receiver = one.receivers[number]
                token = np.array([seed % 96])
                one.say(Verdict(number, 1, seq, len(receiver.tokens), len(receiver.paths), 0, token))
        for one, number in sessions:
            while not any(isinstance(m, Draft) and (m.session, m.seq) == (number, 3) for m in one.heard):
                one.expect(Draft, number)
        for one in edges:
            assert not any(isinstance(message, Error) for message in one.heard)
            one.close()


def test_one_that_does_not_read_is_cut(
    model: ModelHead, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("starsd.server.gateway.SEND_BUFFER", 4096)
    limits = msgspec.structs.replace(SMALL, unsent=2000, stats_seconds=1e-9)
    with running(model, limits) as (gateway, url):
        narrow = socket.socket()
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        narrow.connect(("127.0.0.1", gateway.address[1]))
        edge, calm = Edge(url, sock=narrow, max_queue=1), Edge(url)
        edge.open()
        calm.open()
        edge.prompt(1, 12, 1)
        seq = 0
        try:
            while seq < 5000:  # each brings figures
                seq += 1
                edge.say(Verdict(1, 1, seq, 12 + seq, 0, 0, np.array([seq % 96])))
                time.sleep(0.002)
        except ConnectionClosed:
            pass
        assert seq < 5000
        eventually(lambda: health(url)["sessions"] == 1)
        calm.prompt(1, 12, 1)
        calm.expect(Draft)
        calm.close()
    assert "was cut: it does not read what it is sent" in capfd.readouterr().err


def test_tokens_decide_who_comes_in(model: ModelHead, tmp_path: Path) -> None:
    token = add_token("orin-1", tmp_path / "tokens")
    with running(model, tokens=read_tokens(tmp_path / "tokens")) as (_gateway, url):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": token}):
            with pytest.raises(InvalidStatus) as refused:
                Edge(url, additional_headers=headers)
            assert refused.value.response.status_code == 401
            assert refused.value.response.headers["WWW-Authenticate"] == "Bearer"
            assert b"expected Authorization: Bearer TOKEN" in (refused.value.response.body or b"")
        edge = Edge(url, additional_headers={"Authorization": f"Bearer {token}"})
        edge.open()
        head = edge.welcome.heads[0]
        http = url.replace("ws://", "http://")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{http}/projector/{head.head}")
        assert health(url) == {"status": "ok"}  # for probes, which have no token
        asked = urllib.request.Request(f"{http}/health", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(asked) as answer:
            assert json.loads(answer.read())["connections"] == 1
        edge.close()


def test_the_projector_is_served(server: Server, edge: Edge, drafter: BatchDrafter, tmp_path: Path) -> None:
    head = edge.welcome.heads[0]
    http = server[1].replace("ws://", "http://")
    with urllib.request.urlopen(f"{http}/projector/{head.head}") as answer:
        content = answer.read()
    assert len(content) == head.projector_bytes
    (tmp_path / "projector").write_bytes(content)
    projector = Projector(tmp_path / "projector")
    assert (projector.width, projector.hidden) == (WIDTH, edge.open(projected=True).width)
    for path in ("/projector/", "/projector/../x", f"/projector/{head.head}/"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(http + path)


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(cert)]
    argv += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(argv, check=True, capture_output=True)
    return cert, key


def test_tls(model: ModelHead, certificate: tuple[Path, Path]) -> None:
    ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ours.load_cert_chain(*certificate)
    theirs = ssl.create_default_context(cafile=str(certificate[0]))
    with running(model, tls=ours) as (_, url):
        edge = Edge(url, ssl=theirs)
        edge.open()
        edge.prompt(1, 12, 1)
        edge.expect(Draft)
        edge.close()
        with pytest.raises(ssl.SSLCertVerificationError):
            Edge(url, ssl=ssl.create_default_context())


def test_heads_are_swapped_and_rolled_back(tmp_path: Path) -> None:
    model = write_models(tmp_path)
    with running(model) as (gateway, url):
        edge = Edge(url)
        edge.open()
        before = edge.welcome.heads[0]
        write_head(tmp_path / "head", base_config(draft_vocab_size=48), random_tensors(seed=6))
        assert gateway.pool is not None
        order(gateway, RELOAD)
        error = edge.expect(Error)
        assert error == Error(1, "the head was replaced: open the session again", 0.0)
        after = edge.open(2)
        assert after.head != before.head
        other = Edge(url)
        assert other.welcome.heads[0].head == after.head
        order(gateway, ROLLBACK)
        assert edge.expect(Error, 2).retry_after == 0.0
        assert edge.open(3).head == before.head
        (tmp_path / "head" / "config.json").unlink()
        order(gateway, RELOAD)  # fails: nothing changes
        edge.prompt(3, 12, 1)
        edge.expect(Draft, 3)
        edge.close()
        other.close()


def order(gateway: Gateway, what: str) -> None:
    assert gateway.pool is not None
    gateway.pool.loop.call_soon_threadsafe(gateway.pool.order, what)


def test_the_command_serves_and_drains(model: ModelHead, drafter: BatchDrafter) -> None:
    with command(model, "--dev") as (process, ready):
        assert sorted(ready) == ["event", "heads", "host", "port", "url"]
        assert (ready["event"], ready["host"]) == ("ready", "127.0.0.1")
        edge = Edge(ready["url"])
        assert edge.welcome.heads[0].fingerprint == ready["heads"][0]["fingerprint"]
        edge.open()
        edge.prompt(1, 12, 1)
        edge.expect(Draft)
        assert edge.expect(Stats).values["sessions"] == 1
        process.send_signal(signal.SIGTERM)
        error = edge.expect(Error)
        assert (error.session, error.message, error.retry_after) == (0, "server is going away", 1.0)
        with pytest.raises(ConnectionClosed, match="1001"):
            edge.socket.recv(5)
        edge.close()
        assert process.wait(5) == 0
        assert process.stderr is not None
        said = process.stderr.read()
    assert f"ready at {ready['url']}" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_worker_that_dies_is_started_again(model: ModelHead) -> None:
    with command(model, "--dev", "--workers", "2") as (process, ready):
        edge = Edge(ready["url"])
        edge.open(1)
        edge.open(2)
        workers = children(process.pid)
        assert len(workers) == 2
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
        errors = [edge.expect(Error), edge.expect(Error)]
        assert {error.session for error in errors} == {1, 2}
        assert {(error.message, error.retry_after) for error in errors} == {
            ("the drafter was restarted: open the session again", 0.0)
        }
        edge.say(msgspec.structs.replace(opening_of(edge), session=3))
        refused = edge.expect(Error)  # by the gateway, unless it has not heard yet that the second one is gone too
        assert (refused.message, refused.retry_after) in (
            ("the drafter is starting: open the session again", 1.0),
            ("the drafter was restarted: open the session again", 0.0),
        )
        eventually(lambda: health(ready["url"])["status"] == "ok", 30)
        edge.open(4)
        edge.prompt(4, 12, 1)
        edge.expect(Draft, 4)
        edge.close()
        # nor does a worker outlive the server
        workers = children(process.pid)
        process.kill()
        eventually(lambda: not any(alive(worker) for worker in workers))


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    if not listed.exists():
        pytest.skip("this system does not list children")
    return [int(child) for child in listed.read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_tokens_and_heads_are_read_again(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    model = write_models(tmp_path)
    tokens = tmp_path / "tokens"
    first = add_token("orin-1", tokens)
    theirs = ssl.create_default_context(cafile=str(certificate[0]))
    files = ["--tls-cert", str(certificate[0]), "--tls-key", str(certificate[1]), "--tokens", str(tokens)]

    def bearer(token: str) -> dict[str, Any]:
        return {"ssl": theirs, "additional_headers": {"Authorization": f"Bearer {token}"}}

    with command(model, *files) as (process, ready):
        assert ready["url"].startswith("wss://127.0.0.1:")
        edge = Edge(ready["url"], **bearer(first))
        edge.open()
        second = add_token("orin-2", tokens)
        with pytest.raises(InvalidStatus):
            Edge(ready["url"], **bearer(second))
        process.send_signal(signal.SIGHUP)
        eventually(lambda: comes_in(ready["url"], bearer(second)))
        edge.prompt(1, 12, 1)  # the head is as it was: its sessions go on
        edge.expect(Draft)
        other = Edge(ready["url"], **bearer(second))
        tokens.write_text(tokens.read_text().splitlines()[0])  # of the first device alone
        write_head(tmp_path / "head", base_config(draft_vocab_size=48), random_tensors(seed=6))
        process.send_signal(signal.SIGHUP)
        assert other.expect(Error) == Error(0, "the device's token is no longer known")
        other.close()
        assert edge.expect(Error).message == "the head was replaced: open the session again"
        assert edge.open(2).head != ready["heads"][0]["head"]
        process.send_signal(signal.SIGUSR1)
        assert edge.expect(Error).session == 2
        assert edge.open(3).head == ready["heads"][0]["head"]
        edge.close()


def comes_in(url: str, options: dict[str, Any]) -> bool:
    try:
        Edge(url, **options).close()
    except InvalidStatus:
        return False
    return True


def test_an_address_that_is_taken(model: ModelHead, server: Server) -> None:
    port = server[0].address[1]
    argv = [sys.executable, "-m", "starsd.server.cli", "run", "--model", f"{model.model}={model.head}", "--dev"]
    done = subprocess.run([*argv, "--port", str(port)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"starsd-server: cannot listen on 127.0.0.1 port {port}: ")
    assert len(done.stderr.splitlines()) == 1


def test_noise_harms_nobody(server: Server, drafter: BatchDrafter) -> None:
    """Random bytes behind valid tags, from another connection each time it is closed."""
    draw = np.random.default_rng(7)
    tags = [0x01, 0x03, 0x05, 0x06, 0x07, 0x10, 0x11, 0x12, 0x13, 0x14]
    for _ in range(20):
        other = Edge(server[1], max_queue=None)
        other.open()
        other.prompt(1, 5, 1)
        with contextlib.suppress(ConnectionClosed):
            for _ in range(40):
                body = draw.integers(0, 256, int(draw.integers(0, 60)), np.uint8)
                body[:2] = [1, 0][: len(body)]  # mostly of the session that is open
                other.socket.send(bytes([int(draw.choice(tags))]) + body.tobytes())
        with contextlib.suppress(ConnectionClosed):
            other.close()
    eventually(lambda: health(server[1])["connections"] == 0)
    edge = Edge(server[1])
    edge.open()
    serve_text(edge, drafter, 1, 12, 4)
    for number in range(2, SMALL.slots + 1):
        edge.open(number)
    edge.close()
