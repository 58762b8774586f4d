"""A device for tests of the chat page: serves edge/web/ and speaks the API's JSON, as slowly or badly as one wants."""

from __future__ import annotations

import contextlib
import json
import mimetypes
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

WEB = Path(__file__).parent.parent / "edge" / "web"
CSP = "default-src 'self'"

USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 12,
    "total_tokens": 32,
    "starsd": {
        "passes": 5,
        "accepted_remote": 4,
        "accepted_ngram": 3,
        "tau": 2.2,
        "tokens_per_second": 31.5,
        "bytes_up": 100,
        "bytes_down": 50,
    },
}
STATUS = {
    "model": "tiny",
    "precision": "int8",
    "context": 2048,
    "conversations": 1,
    "busy": 0,
    "link": "up",
    "server": "wss://drafter.example",
    "rtt_ms": 82.4,
    "regime": "streams",
    "notice": "",
    "sampling": {"temperature": 0.8, "top_p": 0.95, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
}


@dataclass
class Reply:
    """What one chat request gets: pieces of text, each a chunk; or a refusal with `status` and OpenAI's error."""

    pieces: list[str] = field(default_factory=lambda: ["Hello", " there."])
    sources: list[str] = field(default_factory=list)  # of the pieces, in turn; none: the target
    pause: float = 0.0  # seconds between pieces
    finish: str | None = "stop"  # None: the connection is cut where the answer would end; "": it ends too early
    status: int = 200
    message: str = ""
    code: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=lambda: USAGE)
    late_error: str = ""  # told in the middle of the stream


class Fake:
    """One fake device. `replies` are used up in order, then the plain one; `asked` are the bodies of chat requests."""

    def __init__(self, port: int = 0) -> None:
        self.replies: deque[Reply] = deque()
        self.status: dict[str, Any] = dict(STATUS)
        self.key = ""
        self.asked: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.left: threading.Event = threading.Event()  # a browser went away in the middle of an answer
        self.connections: set[socket.socket] = set()
        self.closing = False
        fake = self

        class Bound(_Handler):
            device = fake

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Bound)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def kill(self) -> None:
        """What a browser sees of a process that is killed: every connection is reset, and none is taken."""
        self.closing = True
        self.server.shutdown()
        self.server.server_close()
        for connection in list(self.connections):
            with contextlib.suppress(OSError):  # its handler may just have closed it
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.shutdown(socket.SHUT_RD)  # else one that waits for its next request would get an answer
            connection.close()


class _Handler(BaseHTTPRequestHandler):
    device: Fake
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.device.connections.add(self.connection)

    def finish(self) -> None:
        self.device.connections.discard(self.connection)
        super().finish()

    def handle(self) -> None:
        try:
            super().handle()
        except (OSError, ValueError):
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.device.paths.append(path)
        if path == "/v1/starsd/status":
            if not self.refused():
                self.send(200, json.dumps(self.device.status).encode(), "application/json")
            return
        file = WEB / ("index.html" if path == "/" else path.removeprefix("/web/"))
        if (path == "/" or path.startswith("/web/")) and file.is_file():
            self.send(200, file.read_bytes(), mimetypes.guess_type(file.name)[0] or "text/plain")
        else:
            self.send(404, b"{}", "application/json")

    def do_POST(self) -> None:
        self.device.paths.append(self.path)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.refused():
            return
        self.device.asked.append(body)
        reply = self.device.replies.popleft() if self.device.replies else Reply()
        if reply.status != 200:
            self.refuse(reply)
        else:
            self.stream(reply, body)

    def refused(self) -> bool:
        if not self.device.key or self.headers["Authorization"] == f"Bearer {self.device.key}":
            return False
        self.refuse(Reply(status=401, message="a key is needed", code="invalid_api_key"))
        return True

    def refuse(self, reply: Reply) -> None:
        error = {"message": reply.message, "type": "invalid_request_error", "param": None, "code": reply.code}
        self.send(reply.status, json.dumps({"error": error}).encode(), "application/json", reply.headers)

    def send(self, status: int, body: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", CSP)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def stream(self, reply: Reply, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            self.chunk({"delta": {"role": "assistant", "content": ""}})
            for number, piece in enumerate(reply.pieces):
                source = reply.sources[number % len(reply.sources)] if reply.sources else "target"
                self.chunk({"delta": {"content": piece}, "starsd": {"tokens": [{"text": piece, "source": source}]}})
                time.sleep(reply.pause)
            if reply.late_error:
                self.event(json.dumps({"error": {"message": reply.late_error, "code": None}}))
            if reply.finish is None:
                self.close_connection = True
                self.connection.close()
                return
            if reply.finish:
                self.chunk({"delta": {}, "finish_reason": reply.finish})
                self.event(json.dumps({"choices": [], "usage": reply.usage}))
                self.event("[DONE]")
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True
            self.device.left.set()

    def chunk(self, choice: dict[str, Any]) -> None:
        self.event(json.dumps({"object": "chat.completion.chunk", "choices": [{"index": 0, **choice}]}))

    def event(self, data: str) -> None:
        if self.device.closing:
            raise ConnectionResetError
        raw = f"data: {data}\n\n".encode()
        self.wfile.write(f"{len(raw):x}\r\n".encode() + raw + b"\r\n")
        self.wfile.flush()
