"""A tiny head and its target on disk, a server around them, and an edge that speaks to it over real sockets."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from head_builder import VOCAB, base_config, random_tensors, rows, write_head
from tokenizers import Tokenizer, models
from torch_helpers import tiny_llama
from websockets.sync.client import connect

from starsd.server.batch import BatchDrafter
from starsd.server.eagle_heads import load_head
from starsd.server.eagle_layer import EagleLayer
from starsd.server.gateway import Gateway
from starsd.server.limits import ServerLimits
from starsd.server.link import Keys, ModelHead, WorkerConfig
from starsd.server.pool import Pool
from starsd.server.schedules import schedule
from starsd.server.served import Head
from starsd.server.service import Service
from starsd.server.sessions import Sessions
from starsd.shared.clock import RealMailbox
from starsd.shared.features import codec
from starsd.shared.messages import (
    Draft,
    Features,
    HeadInfo,
    Hello,
    Message,
    Open,
    Opened,
    Prefix,
    Verdict,
    Welcome,
)
from starsd.shared.protocol import Connection, Role

M = TypeVar("M")
WIDTH = 96
TARGET = "f" * 64
SMALL = ServerLimits(slots=6, window=64, entries=80, nodes=24, depth=4, top_k=5, max_nodes=100, rows_per_pass=16)
SECONDS = 10.0  # that nothing here should take

Path_ = tuple[int, ...]


def write_models(folder: Path) -> ModelHead:
    """The tiny target and a random head for it."""
    target = folder / "target"
    tiny_llama().save_pretrained(target)
    words = models.WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w0")
    Tokenizer(words).save(str(target / "tokenizer.json"))
    write_head(folder / "head", base_config(draft_vocab_size=48), random_tensors())
    return ModelHead(str(target), str(folder / "head"))


def tiny_drafter(folder: Path, limits: ServerLimits | None = None) -> BatchDrafter:
    """A drafter in this process with the tiny head."""
    model = write_models(folder)
    limits = limits or SMALL
    return BatchDrafter(EagleLayer(load_head(model.head, model.model)), limits.slot_limits, limits.tree)


@dataclass
class Local:
    """A service without sockets: `say` puts a message in, `turn` runs the loop once, `heard` is what came out."""

    drafter: BatchDrafter
    limits: ServerLimits = SMALL
    name: str = "batched"
    heard: list[tuple[bytes, Message]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inbox: RealMailbox[Any] = RealMailbox()
        self.head = Head(HeadInfo(TARGET, "ab", "tiny"), self.drafter, VOCAB, True)
        self.sessions = Sessions([self.head], lambda peer, message: self.heard.append((peer, message)), self.limits)
        self.service = Service(self.sessions, schedule(self.name, self.limits), self.inbox)

    def say(self, peer: bytes, *items: Any) -> None:
        for item in items:
            self.inbox.put((peer, item))

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.service.turn(0.0)

    def of(self, kind: type[M], peer: bytes = b"a") -> list[M]:
        return [message for owner, message in self.heard if owner == peer and isinstance(message, kind)]


def opening(session: int = 1, codec_name: str = "fp16", fingerprint: str = TARGET, **more: Any) -> Open:
    return Open(session, fingerprint, VOCAB, codec_name, **more)


def text(count: int, seed: int = 1, codec_name: str = "fp16") -> tuple[np.ndarray, bytes, np.ndarray]:
    """`count` + 1 tokens, the features of all rows as bytes, and as the drafter reads them."""
    features, following = rows(count, WIDTH, seed)
    data = codec(codec_name).encode(features)
    return np.array([0, *following.tolist()]), data, codec(codec_name).decode(data, WIDTH)


@dataclass
class Receiver:
    """What an edge knows of a session's tree: each node's whole text, as a path from the first token on."""

    tokens: list[int] = field(default_factory=list)
    paths: list[Path_] = field(default_factory=list)

    def begin(self, tokens: np.ndarray) -> None:
        self.tokens, self.paths = tokens.tolist(), []

    def take(self, draft: Draft) -> None:
        assert draft.first == len(self.paths)
        for parent, token in zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True):
            above = tuple(self.tokens[: draft.base]) if parent < 0 else self.paths[parent]
            self.paths.append((*above, token))

    def below(self, base: int) -> set[Path_]:
        """Nodes that hang below the first `base` tokens, without these."""
        root = tuple(self.tokens[:base])
        return {path[base:] for path in self.paths if path[:base] == root and len(path) > base}


def best_paths(drafter: BatchDrafter, tokens: np.ndarray, features: np.ndarray, nodes: int) -> set[Path_]:
    """The best tree at rest of a session of its own."""
    session = drafter.open()
    session.commit(tokens)
    session.feed(0, features)
    while drafter.advance([(session, 8)], nodes):
        pass
    tree = session.tree.best(nodes)
    session.close()
    return as_paths(tree.tokens, tree.parents)


def as_paths(tokens: np.ndarray, parents: np.ndarray) -> set[Path_]:
    found: list[Path_] = [()]
    for token, parent in zip(tokens[1:].tolist(), parents[1:].tolist(), strict=True):
        found.append((*found[parent], token))
    return set(found[1:])


class Edge:
    """An edge's connection. `expect` takes messages until one of a kind comes; others are kept in `heard`."""

    def __init__(self, url: str, *, hello: bool = True, **options: Any) -> None:
        self._stack = ExitStack()
        self.socket = self._stack.enter_context(connect(url, compression=None, max_size=None, **options))
        self.connection = Connection(Role.EDGE)
        self.heard: list[Message] = []
        self.receivers: dict[int, Receiver] = {}
        if hello:
            self.say(Hello(2, 2, "test"))
            self.welcome = self.expect(Welcome)

    def say(self, *messages: Message) -> None:
        for message in messages:
            if isinstance(message, Prefix):
                self.receivers.setdefault(message.session, Receiver()).begin(message.tokens)
            if isinstance(message, Verdict):
                self.receivers[message.session].tokens += message.tokens.tolist()
            self.socket.send(self.connection.send(message))

    def say_raw(self, frame: bytes | str) -> None:
        """What `Connection` would never let an edge say."""
        self.connection.sent_bytes += len(frame)
        self.socket.send(frame)

    def open(self, session: int = 1, **more: Any) -> Opened:
        self.say(opening(session, fingerprint=self.welcome.heads[0].fingerprint, **more))
        return self.expect(Opened)

    def hear(self, timeout: float = SECONDS) -> Message:
        while True:
            data = self.socket.recv(timeout)
            assert isinstance(data, bytes)
            message = self.connection.receive(data)
            if message is not None:
                self.heard.append(message)
                if isinstance(message, Draft):
                    self.receivers[message.session].take(message)
                return message

    def expect(self, kind: type[M], session: int | None = None, timeout: float = SECONDS) -> M:
        end = time.monotonic() + timeout
        while True:
            message = self.hear(max(0.0, end - time.monotonic()))
            if isinstance(message, kind) and session in (None, getattr(message, "session", None)):
                return message

    def prompt(self, session: int, count: int, seed: int, epoch: int = 1) -> np.ndarray:
        """Prefix and features of a random text; its features as the drafter reads them."""
        tokens, data, features = text(count, seed)
        self.say(Prefix(session, epoch, 0, tokens), Features(session, epoch, 0, data))
        return features

    def rest(self, session: int, wanted: set[Path_], timeout: float = SECONDS) -> None:
        """Hear drafts until all wanted paths hang below the newest token."""
        end = time.monotonic() + timeout
        receiver = self.receivers[session]
        while not wanted <= receiver.below(len(receiver.tokens)):
            self.expect(Draft, session, max(0.0, end - time.monotonic()))

    def close(self) -> None:
        self._stack.close()


@contextmanager
def running(
    model: ModelHead,
    limits: ServerLimits = SMALL,
    *,
    endpoint: str = "inproc://workers",
    tokens: dict[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
    workers: int = 1,
    keys: Keys | None = None,
    name: str = "batched",
) -> Iterator[tuple[Gateway, str]]:
    """A server in this process, its worker a thread unless `endpoint` says otherwise; the gateway and its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def begin() -> tuple[Gateway, Pool]:
        gateway = Gateway(limits, host="127.0.0.1", port=0, tokens=tokens, tls=tls)
        config = WorkerConfig(
            endpoint=endpoint,
            name="",
            folder="",
            models=(model,),
            schedule=name,
            dtype="fp32",
            limits=limits,
            keys=keys,
        )
        pool = Pool(config, workers, gateway)
        await pool.start()
        await gateway.listen(pool)
        return gateway, pool

    async def end() -> None:
        await gateway.drain()
        await pool.close()

    gateway, pool = asyncio.run_coroutine_threadsafe(begin(), loop).result(60)
    try:
        scheme = "ws" if tls is None else "wss"
        yield gateway, f"{scheme}://127.0.0.1:{gateway.address[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def command(model: ModelHead, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """`starsd-server run --dev` as a process, and its ready line."""
    argv = [sys.executable, "-m", "starsd.server.cli", "run", "--model", f"{model.model}={model.head}"]
    argv += ["--host", "127.0.0.1", "--port", "0", "--dtype", "fp32", "--json", *arguments]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, process.stderr.read() if process.stderr else ""
            yield process, json.loads(line)
        finally:
            process.kill()


def eventually(check: Any, timeout: float = SECONDS) -> float:
    """Seconds until it held."""
    start = time.monotonic()
    while not check():
        assert time.monotonic() < start + timeout, "did not happen in time"
        time.sleep(0.005)
    return time.monotonic() - start
