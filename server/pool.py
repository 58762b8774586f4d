"""The workers of a gateway: started, watched, started again, and what goes to and comes from each."""

from __future__ import annotations

import asyncio
import hmac
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio
import zmq.auth.asyncio

from starsd.server.link import (
    NOBODY,
    STOP,
    Failed,
    Figures,
    Keys,
    Order,
    Ready,
    WorkerConfig,
    check_endpoint,
    decode_notice,
    encode,
)
from starsd.shared.errors import StarsdError, UsageError

PAUSES = (0.0, 0.5, 1.0, 2.0, 5.0)  # seconds before a worker that ended is started again, growing
STEADY_SECONDS = 60.0  # after which one that ran counts as sound
STOP_SECONDS = 2.0

# so many threads for a pass: libraries read these when they are loaded
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class Owner(Protocol):
    """Who has a pool, and hears what its workers say."""

    def deliver(self, worker: Worker, peer: bytes, data: bytes) -> None: ...

    def lost(self, worker: Worker) -> None:
        """A worker ended; what it knew of sessions is gone."""
        ...

    def log(self, text: str) -> None: ...


class Worker:
    """One worker as the gateway sees it; `ready` says which heads it drafts with, None while it cannot."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.name = b""  # changes with every start, so that nothing of an earlier life is taken for its own
        self.ready: Ready | None = None
        self.figures: dict[str, float] = {}
        self.starts = 0


class Pool:
    """Call `start`, then `send`; `close` at the end."""

    def __init__(self, config: WorkerConfig, count: int, owner: Owner) -> None:
        """`config.endpoint` "" stands for a socket in a folder of our own, `config.folder` "" for that folder."""
        self._place = Path(tempfile.mkdtemp(prefix="starsd-"))
        endpoint = config.endpoint or f"ipc://{self._place}/workers"
        self.workers = [Worker(number) for number in range(count)]
        self._owner = owner
        self._context = zmq.asyncio.Context()
        self._guard = None if config.keys is None else guarded(self._context, config.keys)
        self._socket, self.endpoint = bound(endpoint, self._context, config.keys)
        folder = config.folder or str(self._place)
        self._config = msgspec.structs.replace(config, endpoint=self.endpoint, folder=folder)
        self._changed = asyncio.Event()
        self._failed = ""
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all workers; returns when they are ready. Raises StarsdError with what kept one from it."""
        self.loop = asyncio.get_running_loop()
        self._tasks = [asyncio.create_task(self._listen())]
        self._tasks += [asyncio.create_task(self._keep(worker)) for worker in self.workers]
        while any(worker.ready is None for worker in self.workers):
            await self._changed.wait()
            self._changed.clear()
            if self._failed:
                raise StarsdError(self._failed)
            if broken := next((task for task in self._tasks if task.done()), None):
                broken.result()

    async def close(self) -> None:
        """Stop the workers, and end those that do not stop."""
        self._stopping = True
        self.order(STOP)
        keepers = self._tasks[1:]
        if keepers:
            await asyncio.wait(keepers, timeout=STOP_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        if self._guard is not None:
            self._guard.stop()
        self._context.term()
        shutil.rmtree(self._place, ignore_errors=True)

    def send(self, worker: Worker, peer: bytes, data: bytes) -> None:
        """Pass on a peer's message, or with no bytes that it is gone. To a worker that is not there, nothing."""
        if worker.ready is not None:
            self._put(worker, peer, data)

    def order(self, what: str) -> None:
        """Have all workers do something (`link.Order`)."""
        for worker in self.workers:
            if worker.ready is not None:
                self._put(worker, NOBODY, encode(Order(what)))

    def _put(self, worker: Worker, peer: bytes, data: bytes) -> None:
        # a queue without limit never makes the sender wait: what is under way is bounded for each peer
        self._socket.send_multipart([worker.name, peer, data])

    async def _listen(self) -> None:
        by_name: dict[bytes, Worker] = {}
        while True:
            name, peer, data = await self._socket.recv_multipart()
            worker = by_name.get(name)
            if worker is None or worker.name != name:
                by_name = {worker.name: worker for worker in self.workers}
                worker = by_name.get(name)
            if worker is None:
                continue  # of an earlier life
            if peer == NOBODY:
                self._notice(worker, data)
            else:
                self._owner.deliver(worker, peer, data)

    def _notice(self, worker: Worker, data: bytes) -> None:
        match decode_notice(data):
            case Ready() as ready:
                worker.ready = ready
                for text in ready.warnings:
                    self._owner.log(text)
            case Failed(message):
                if worker.ready is None and worker.starts == 1:
                    self._failed = message
                else:
                    self._owner.log(f"worker {worker.number}: {message}")
            case Figures(values):
                worker.figures = values
        self._changed.set()

    async def _keep(self, worker: Worker) -> None:
        """Have this worker run until the pool closes."""
        failures, loop = 0, asyncio.get_running_loop()
        while not self._stopping:
            worker.starts += 1
            worker.name = f"{worker.number}.{worker.starts}".encode()
            config = msgspec.structs.replace(self._config, name=worker.name.decode())
            started = loop.time()
            status = await self._run(config)
            known, worker.ready, worker.name = worker.ready, None, b""
            self._changed.set()
            if self._stopping or (known is None and worker.starts == 1):
                self._failed = self._failed or f"worker {worker.number} ended before it was ready: {status}"
                return
            self._owner.lost(worker)
            failures = 0 if loop.time() - started > STEADY_SECONDS else failures + 1
            pause = PAUSES[min(failures - 1, len(PAUSES) - 1)] if failures else 0.0
            self._owner.log(f"worker {worker.number} ended ({status}), starts again")
            await asyncio.sleep(pause)

    async def _run(self, config: WorkerConfig) -> str:
        """One life of a worker; how it ended."""
        if config.endpoint.startswith("inproc://"):
            return await asyncio.to_thread(_serve_here, config, zmq.Context(self._context))
        environment = os.environ | dict.fromkeys(_THREADS, str(config.threads))
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "starsd.server.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=2,
            env=environment,
            start_new_session=True,  # a terminal's signals are for us; it ends with its standard input
        )
        try:
            assert child.stdin is not None
            child.stdin.write(encode(config) + b"\n")
            await child.stdin.drain()
            return f"exit status {await child.wait()}"
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()


def _serve_here(config: WorkerConfig, context: Any) -> str:
    from starsd.server.worker import serve

    try:
        serve(config, context)
    except Exception as error:  # as a process would end with it
        return f"{type(error).__name__}: {error}"
    return "returned"


class _Known:
    """The one key that opens."""

    def __init__(self, keys: Keys) -> None:
        self._public = keys.public.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        return hmac.compare_digest(key, self._public)


def guarded(context: zmq.asyncio.Context, keys: Keys) -> zmq.auth.asyncio.AsyncioAuthenticator:
    """Lets in who has these keys; to be made before the socket is bound."""
    guard = zmq.auth.asyncio.AsyncioAuthenticator(context)
    guard.start()
    guard.configure_curve_callback("*", _Known(keys))
    return guard


def bound(endpoint: str, context: zmq.asyncio.Context, keys: Keys | None) -> tuple[zmq.asyncio.Socket, str]:
    """A gateway's socket for its workers, and where they find it. Raises UsageError for tcp without keys."""
    check_endpoint(endpoint, keys)
    socket = context.socket(zmq.ROUTER)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 0)
    if keys is not None:
        socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
        socket.curve_server = True
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise UsageError(f"workers cannot be reached at {endpoint}: {error}") from error
    return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)
