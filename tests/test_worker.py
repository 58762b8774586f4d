"""A worker behind its ZeroMQ socket: what it takes, what it confirms, who may reach it."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
import zmq.utils.monitor
from server_helpers import SMALL, Edge, opening, running, text, write_models

from starsd.server import link
from starsd.server.link import Failed, Figures, Keys, ModelHead, Order, Ready, WorkerConfig, decode_notice
from starsd.server.sessions import GONE
from starsd.server.worker import GatewayLink, connected, serve
from starsd.shared import codec
from starsd.shared.errors import RemoteProtocolError, UsageError
from starsd.shared.limits import Layout
from starsd.shared.messages import Ack, Close, Draft, Features, Open, Opened, Prefix

LAYOUT = Layout.of(opening(), Opened(1, "ab", 96, 64, 100))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelHead:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    with zmq.Context() as made:
        yield made


@pytest.fixture
def gateway(context: zmq.Context[Any]) -> Iterator[zmq.Socket[bytes]]:
    """What the worker connects to."""
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.RCVTIMEO, 10_000)
    socket.bind("inproc://gateway")
    yield socket
    socket.close()


def config(model: ModelHead, folder: Any, **changes: Any) -> WorkerConfig:
    return WorkerConfig(
        endpoint="inproc://gateway",
        name="w",
        models=(model,),
        folder=str(folder),
        dtype="fp32",
        limits=SMALL,
        **changes,
    )


def test_messages_come_out_as_they_went_in(context: zmq.Context[Any], gateway: zmq.Socket[bytes]) -> None:
    with connected("inproc://gateway", "w", context) as socket:
        inbox = GatewayLink(socket)
        inbox.layout_of = lambda peer, session: LAYOUT if (peer, session) == (b"7", 1) else None
        assert inbox.take(0.01) == []
        frames = [codec.encode(opening(2)), codec.encode(Prefix(1, 1, 0, np.array([1, 2])), LAYOUT)]
        for frame in frames:
            gateway.send_multipart([b"w", b"7", frame])
        gateway.send_multipart([b"w", b"8", frames[1]])
        gateway.send_multipart([b"w", b"9", codec.encode(Close(1))])
        gateway.send_multipart([b"w", b"9", b""])
        gateway.send_multipart([b"w", b"", link.encode(Order("reload"))])
        items: list[Any] = []
        while len(items) < 5:
            items += inbox.take(1.0)
        assert [peer for peer, _ in items] == [b"7", b"7", b"8", b"9", b"9"]
        assert isinstance(items[0][1], Open)
        assert items[1][1].tokens.tolist() == [1, 2]
        assert isinstance(items[2][1], RemoteProtocolError)  # of a session of another peer
        assert (items[2][1].session, str(items[2][1])) == (1, "prefix is of session 1, which is not open")
        assert items[4][1] is GONE
        inbox.take(0.01)
        assert inbox.orders == ["reload"]
        taken: dict[bytes, int] = {}
        while gateway.poll(100):
            _, peer, data = gateway.recv_multipart()
            message = codec.decode(data, lambda session: None)
            assert isinstance(message, Ack)
            taken[peer] = message.received
        assert taken[b"7"] == sum(map(len, frames))
        assert taken[b"8"] == len(frames[1])
        with pytest.raises(NotImplementedError):
            inbox.put((b"7", GONE))


def test_it_says_which_heads_it_has_and_drafts(
    model: ModelHead, context: zmq.Context[Any], gateway: zmq.Socket[bytes], tmp_path: Path
) -> None:
    thread = threading.Thread(target=serve, args=(config(model, tmp_path), context))
    thread.start()
    name, peer, data = gateway.recv_multipart()
    ready = decode_notice(data)
    assert (name, peer) == (b"w", b"")
    assert isinstance(ready, Ready)
    (head,) = ready.heads
    assert list(ready.projectors) == [head.head]

    def say(data: bytes, peer: bytes = b"5") -> None:
        gateway.send_multipart([b"w", peer, data])

    def hear(kind: type[Any]) -> Any:
        while True:
            _, peer, data = gateway.recv_multipart()
            message = codec.decode(data, lambda session: LAYOUT) if peer else decode_notice(data)
            if isinstance(message, kind):
                return message

    say(codec.encode(opening(fingerprint=head.fingerprint)))
    assert hear(Opened).head == head.head
    tokens, rows, _ = text(12)
    say(codec.encode(Prefix(1, 1, 0, tokens), LAYOUT))
    say(codec.encode(Features(1, 1, 0, rows), LAYOUT))
    assert len(hear(Draft).tokens) == SMALL.top_k
    say(link.encode(Order("rollback")), b"")
    assert hear(Failed).message == "no heads were there before these, expected a reload first"
    assert hear(Figures).values["sessions"] == 1
    say(codec.encode(Close(1)))
    assert hear(Close) == Close(1)
    say(codec.encode(Close(1)))
    assert hear(Close) == Close(1)  # every one is answered
    say(link.encode(Order("stop")), b"")
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        (["target="], r"no head is packaged for .*target: name one as .*target=HEAD, a folder or hf:org/name"),
        (["target=head", "target=head"], r".*target is served twice, expected one head a target"),
        (["target=target"], r"head has 7 layers, expected 1"),
        (["target=hf:a/b"], r"hf:a/b is not here yet: run starsd pull hf:a/b"),
        (["nothing=head"], r"model .*nothing' is unknown, expected one of .*"),
    ],
)
def test_heads_that_cannot_be_loaded(
    model: ModelHead,
    context: zmq.Context[Any],
    gateway: zmq.Socket[bytes],
    tmp_path: Path,
    heads: list[str],
    message: str,
) -> None:
    base = Path(model.model).parent
    named = (entry.split("=") for entry in heads)
    models = tuple(
        ModelHead(f"{base}/{target}", head if ":" in head or not head else f"{base}/{head}") for target, head in named
    )
    serve(msgspec.structs.replace(config(model, tmp_path), models=models), context)
    notice = decode_notice(gateway.recv_multipart()[2])
    assert isinstance(notice, Failed)
    assert re.fullmatch(message, notice.message), notice.message


def test_tcp_demands_keys(model: ModelHead, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"worker endpoint tcp://127.0.0.1:1 has no CURVE keys, expected some for tcp"):
        msgspec.structs.replace(config(model, tmp_path), endpoint="tcp://127.0.0.1:1")


def test_a_worker_over_tcp(model: ModelHead) -> None:
    keys = Keys(*(key.decode() for key in zmq.curve_keypair()))
    with running(model, endpoint="tcp://127.0.0.1:*", keys=keys) as (gateway, url):
        edge = Edge(url)
        edge.open()
        edge.prompt(1, 12, 1)
        edge.expect(Draft)
        assert gateway.pool is not None
        endpoint = gateway.pool.endpoint
        for public, secret in (zmq.curve_keypair(), (None, None)):
            # a stranger knows where, and with which key the gateway answers, and says that it is worker 0
            with zmq.Context() as context:
                stranger = context.socket(zmq.DEALER)
                stranger.setsockopt(zmq.LINGER, 0)
                if public is not None:
                    stranger.curve_publickey, stranger.curve_secretkey = public, secret
                    stranger.curve_serverkey = keys.public.encode()
                monitor = stranger.get_monitor_socket()
                stranger.connect(endpoint)
                refused = False
                end = time.monotonic() + 5
                while not refused and time.monotonic() < end and monitor.poll(2000):
                    event = zmq.utils.monitor.recv_monitor_message(monitor)["event"]
                    assert event != zmq.EVENT_HANDSHAKE_SUCCEEDED
                    refused = event in REFUSALS
                assert refused
                stranger.disable_monitor()
                monitor.close()
                stranger.close()
        edge.close()


REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_DISCONNECTED,
)
