"""Who is let in, and what is written down."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_helpers import Served, open_runtime, served, wait_until
from tiny_session import ToyTarget

from starsd.edge.api_guard import is_loopback
from starsd.edge.api_settings import Settings

CHAT = "/v1/chat/completions"
SECRET = "the otter sleeps at noon"
ASKED = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 2}
KEYS = ("a-key-of-some-length", "another-key-of-ours")
SITE = "https://app.example"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(open_runtime(tmp_path_factory.mktemp("open"))) as place:
        yield place


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Asks for a key, and lets one site's pages in."""
    folder = tmp_path_factory.mktemp("locked")
    web = folder / "web"
    web.mkdir()
    (web / "index.html").write_text("<!doctype html><title>chat</title>")
    (web / "chat.css").write_text("body { margin: 0 }")
    (folder / "secret.txt").write_text("not for the web")
    settings = Settings(keys=KEYS, origins=(SITE,))
    with served(open_runtime(folder / "bundle"), settings, web) as place:
        yield place


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("key", KEYS)
def test_a_key_lets_in(locked: Served, key: str) -> None:
    assert locked.ask("POST", CHAT, ASKED, bearer(key))[0] == 200
    assert locked.ask("GET", "/metrics", headers={"authorization": f"bearer  {key} "})[0] == 200


def test_with_a_key_any_name_will_do(locked: Served) -> None:
    assert locked.ask("GET", "/v1/models", headers={"Host": "device.example", **bearer(KEYS[0])})[0] == 200
    assert locked.ask("GET", "/v1/models", headers={"Host": "device.example"})[0] == 401


@pytest.mark.parametrize(
    "headers",
    [{}, bearer(""), bearer("a-key"), bearer(KEYS[0] + "x"), {"Authorization": KEYS[0]}, {"Authorization": "Basic x"}],
)
def test_nothing_else_does(locked: Served, headers: dict[str, str]) -> None:
    for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/v1/starsd/status")):
        status, told, said = locked.ask(method, path, ASKED if method == "POST" else None, headers)
        assert (status, told["www-authenticate"]) == (401, "Bearer")
        assert said["error"] == {
            "message": "API key is missing or wrong, expected Authorization: Bearer KEY",
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_api_key",
        }


def test_health_and_the_page_need_no_key(locked: Served) -> None:
    for path in ("/health", "/", "/web/chat.css"):
        assert locked.ask("GET", path)[0] == 200


def test_the_page_comes_with_strict_headers(locked: Served) -> None:
    locked.log.clear()
    for path, kind in (("/", "text/html; charset=utf-8"), ("/web/chat.css", "text/css; charset=utf-8")):
        status, headers, body = locked.ask("GET", path)
        assert (status, headers["content-type"]) == (200, kind)
        assert headers["content-security-policy"].startswith("default-src 'self';")
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["cache-control"] == "no-cache"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert locked.ask("GET", path, headers={"If-None-Match": headers["etag"]})[0] == 304
        assert locked.ask("HEAD", path)[0] == 200
        assert body
    assert locked.log == []  # nobody needs to know


@pytest.mark.parametrize("path", ["/web/../secret.txt", "/web/%2e%2e/secret.txt", "/web/none.js", "/web/", "/web//etc"])
def test_only_the_pages_files_are_served(locked: Served, path: str) -> None:
    status, _, said = locked.ask("GET", path, headers=bearer(KEYS[0]))
    assert (status, said["error"]["code"]) == (404, "unknown_url")


def test_paths_and_methods(place: Served) -> None:
    error = place.refused("/v1/embeddings", {}, 404)
    assert error["message"] == (
        "path is not served here, expected one of /health, /metrics, /v1/chat/completions, /v1/completions, "
        "/v1/models, /v1/models/{model}, /v1/starsd/status"
    )
    assert error["code"] == "unknown_url"
    error = place.refused("/v1/models", {}, 405)
    assert (error["message"], error["code"]) == (
        "method POST is not allowed here, expected GET",
        "method_not_allowed",
    )
    status, headers, said = place.ask("GET", CHAT)
    assert (status, headers["allow"]) == (405, "POST")
    assert said["error"]["message"] == "method GET is not allowed here, expected POST"
    assert place.ask("GET", "/")[0] == 404
    assert place.ask("GET", "/docs")[0] == 404  # it would load scripts from elsewhere


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8080", "127.0.0.1", "127.8.9.1:1", "[::1]", "[::1]:8080"])
def test_names_of_this_machine(place: Served, host: str) -> None:
    assert place.ask("GET", "/v1/models", headers={"Host": host})[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "192.168.1.2", "", "["]
)
def test_other_names_are_refused(place: Served, host: str) -> None:
    status, _, said = place.ask("POST", CHAT, ASKED, {"Host": host})
    assert (status, said["error"]["code"]) == (403, "wrong_host")
    assert said["error"]["message"] == "host is not this machine, expected localhost or 127.0.0.1"


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost:1", "http://localhost.evil.example"]
)
def test_pages_from_elsewhere_are_refused(place: Served, origin: str) -> None:
    status, headers, said = place.ask("POST", CHAT, ASKED, {"Origin": origin, "Content-Type": "text/plain"})
    assert (status, said["error"]["code"]) == (403, "wrong_origin")
    assert said["error"]["message"] == "origin is another site: --allow-origin lets it in"
    assert "access-control-allow-origin" not in headers
    preflight = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    assert place.ask("OPTIONS", CHAT, headers=preflight)[0] == 403


def test_our_own_page_is_let_in(place: Served) -> None:
    assert place.ask("POST", CHAT, ASKED, {"Origin": place.url})[0] == 200


def test_an_allowed_site_is_let_in_and_others_are_not(locked: Served) -> None:
    preflight = {"Origin": SITE, "Access-Control-Request-Method": "POST"}
    preflight["Access-Control-Request-Headers"] = "authorization, content-type"
    status, headers, _ = locked.ask("OPTIONS", CHAT, headers=preflight)
    assert (status, headers["access-control-allow-origin"]) == (200, SITE)
    status, headers, _ = locked.ask("POST", CHAT, ASKED, {"Origin": SITE, **bearer(KEYS[0])})
    assert (status, headers["access-control-allow-origin"]) == (200, SITE)
    assert locked.ask("POST", CHAT, ASKED, {"Origin": SITE})[1]["access-control-allow-origin"] == SITE  # the 401 too
    assert locked.ask("POST", CHAT, ASKED, {"Origin": "https://other.example", **bearer(KEYS[0])})[0] == 403


def test_the_log_has_numbers_and_nothing_of_what_users_wrote(place: Served) -> None:
    place.log.clear()
    _, headers, said = place.ask("POST", CHAT, ASKED)
    number = headers["x-request-id"]
    place.ask("POST", CHAT, {**ASKED, "model": SECRET})
    place.ask("GET", f"/{SECRET.replace(' ', '-')}")
    place.ask("GET", "/health")
    wait_until(lambda: len(place.log) == 3)  # written after the answer
    assert place.log[0].startswith(f"{number} POST /v1/chat/completions 200 ")
    assert place.log[1].split()[1:4] == ["POST", "/v1/chat/completions", "404"]
    assert place.log[2].split()[1:4] == ["GET", "other", "404"]
    everything = " ".join(place.log)
    assert "otter" not in everything
    assert said["choices"][0]["message"]["content"] not in everything


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 1_000_000,
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /\0 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" * 9,
    ],
    ids=lambda head: repr(head[:12] + head[-12:]),
)
def test_what_is_no_http_ends_its_connection_alone(place: Served, head: bytes) -> None:
    came = b""
    with socket.create_connection(("127.0.0.1", place.port), timeout=10) as client, contextlib.suppress(OSError):
        client.sendall(head)
        while chunk := client.recv(1 << 16):
            came += chunk
    assert came.startswith(b"HTTP/1.1 400 ") or (not came and len(head) > 100_000)  # closed while we were sending
    assert place.ask("GET", "/health")[0] == 200


class BrokenTarget(ToyTarget):
    """Fails as only a fault of ours does, with a user's words in the message."""

    def logits(self, context: Any) -> Any:
        raise KeyError(SECRET)


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_of_ours_is_told_without_details(tmp_path: Path, stream: bool) -> None:
    with served(open_runtime(tmp_path, BrokenTarget)) as place:
        long = {"messages": [{"role": "user", "content": "so " * 300}]}  # of which a piece comes before the first pass
        status, _, said = place.ask("POST", CHAT, {**ASKED, **(long if stream else {}), "stream": stream})
        events = said.decode().split("\n\n") if stream else []
        error = (json.loads(events[-2].removeprefix("data: ")) if stream else said)["error"]
        assert status == (200 if stream else 500)
        assert error["message"] == "the server failed at this request; its log says where"
        assert error["type"] == "server_error"
        wait_until(lambda: len(place.log) == 2)  # written after the answer
        assert re.match(r"req_\w+ failed: KeyError at test_api_guard.py:\d+ < ", place.log[0])
        assert "otter" not in " ".join(place.log)
        assert place.ask("GET", "/health")[0] == 200


@pytest.mark.parametrize(
    ("host", "alone"),
    [("localhost", True), ("::1", True), ("[::1]", True), ("127.1.2.3", True), ("0.0.0.0", False), ("device", False)],
)
def test_loopback(host: str, alone: bool) -> None:
    assert is_loopback(host) is alone
