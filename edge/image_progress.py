"""How far a first boot is, on the console and over HTTP: a page for people at /, JSON for programs at /progress."""

from __future__ import annotations

import contextlib
import html
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec

_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="2">
<meta name="viewport" content="width=device-width"><title>First boot</title>
<style>body{{font:1rem/1.5 system-ui;max-width:36rem;margin:3rem auto;padding:0 1rem;color-scheme:light dark}}</style>
<h1>First boot</h1><p>{state}</p><ol>{items}</ol></html>"""


class StepState(msgspec.Struct):
    name: str
    what: str
    state: str = "waits"  # waits, runs, done, was done, skipped or failed
    note: str = ""  # the newest line of what runs, or why it failed


class Progress(msgspec.Struct):
    """One writer, many readers; each field is replaced whole."""

    steps: list[StepState]
    finished: bool = False
    failed: str = ""

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    def page(self) -> bytes:
        rows = "".join(
            f"<li>{html.escape(step.what)}: <b>{html.escape(step.state)}</b> {html.escape(step.note)}</li>"
            for step in self.steps
        )
        state = "Ready." if self.finished else f"Failed: {self.failed}" if self.failed else "This is done once."
        return _PAGE.format(state=html.escape(state), items=rows).encode()


@contextlib.contextmanager
def served(progress: Progress, host: str, port: int) -> Iterator[int | None]:
    """Serve the progress while the block runs; gives the port, or None where it cannot be had, which is no matter."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            known = {
                "/": (progress.page, "text/html; charset=utf-8"),
                "/progress": (progress.encode, "application/json"),
            }
            if self.path not in known:
                self.send_error(404)
                return
            make, kind = known[self.path]
            body = make()
            self.send_response(200)
            for name, value in (
                ("Content-Type", kind),
                ("Content-Length", str(len(body))),
                ("Cache-Control", "no-store"),
            ):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError:
        yield None
        return
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
