"""Projectors of the heads that a server drafts with: kept below the home, fetched from the server when missing.

A session opens without one while it is being fetched, and sends raw taps: three times the bytes, the same drafts.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from starsd.edge.projector import Projector
from starsd.shared.errors import ModelError
from starsd.shared.home import home
from starsd.shared.messages import HeadInfo

LARGEST = 1 << 30  # bytes
SECONDS = 30.0  # without a byte
AGAIN_SECONDS = 60.0  # after a failure
_NAME = re.compile(r"[0-9a-f]{16,64}")


class ProjectorStore:
    """Call it with a head: its projector, or None while there is none. `fetched` is called when one has come."""

    def __init__(self, url: str, token: str, tls: ssl.SSLContext | None, fetched: Callable[[], None]) -> None:
        parts = urlsplit(url)
        self._base = urlunsplit(("https" if parts.scheme == "wss" else "http", parts.netloc, "/projector/", "", ""))
        self._token, self._fetched = token, fetched
        # as for the WebSocket, no proxy of the environment stands between
        secure = urllib.request.HTTPSHandler(context=tls)
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({}), secure).open
        self._known: dict[str, Projector] = {}
        self._asked: set[str] = set()
        self._failed: dict[str, float] = {}  # heads whose projector could not be had, and when

    def __call__(self, head: HeadInfo) -> Projector | None:
        if not _NAME.fullmatch(head.head) or head.projector_bytes > LARGEST:
            return None
        if head.head not in self._known:
            file = home() / "projectors" / f"{head.head}.safetensors"
            try:
                self._known[head.head] = Projector(file)
            except (ModelError, OSError):
                self._fetch(head, file)
        return self._known.get(head.head)

    def _fetch(self, head: HeadInfo, file: Path) -> None:
        failed = self._failed.get(head.head, -AGAIN_SECONDS)
        if head.head not in self._asked and time.monotonic() - failed >= AGAIN_SECONDS:
            self._asked.add(head.head)
            threading.Thread(target=self._download, args=(head, file), name="projector", daemon=True).start()

    def _download(self, head: HeadInfo, file: Path) -> None:
        """Any failure only means that raw taps go on being sent; after a while a new session tries again."""
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        part = file.with_name(f".{file.name}.{os.getpid()}.part")
        try:
            request = urllib.request.Request(self._base + head.head, headers=headers)
            with self._open(request, timeout=SECONDS) as answer:
                data = answer.read(head.projector_bytes + 1)
            if len(data) != head.projector_bytes:
                return
            file.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(data)
            self._known[head.head] = Projector(part)
            os.replace(part, file)
        except (OSError, ModelError, http.client.HTTPException):
            with contextlib.suppress(OSError):
                part.unlink()
        finally:
            self._failed[head.head] = time.monotonic()
            self._asked.discard(head.head)
        if head.head in self._known:
            self._fetched()
