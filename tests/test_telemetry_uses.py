"""What is done with what is known of the device: fewer drafts while it is throttled, figures for its server and for
Prometheus, joules of an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from api_helpers import open_runtime, served
from edge_ends import MODEL, Hands, OneChannel, of
from runtime_helpers import ENDLESS, alone, run
from server_helpers import SMALL
from tiny_session import EOS, ToyTarget

from starsd.edge import Limits, Runtime
from starsd.edge import run as command
from starsd.edge import runtime as runtimes
from starsd.edge.channel import STATS_SECONDS
from starsd.edge.cli import main
from starsd.edge.policy import MOST_THROTTLED
from starsd.edge.speculator import Speculator
from starsd.edge.telemetry import STALE, Telemetry
from starsd.edge.telemetry_process import ProcessTelemetry
from starsd.edge.telemetry_reading import BOARD, GPU, Reading
from starsd.edge.text import Text
from starsd.server.gateway import Gateway
from starsd.server.metrics import fleet
from starsd.server.peer import Peer
from starsd.shared.codec import encode
from starsd.shared.messages import Draft, Hello, Stats
from starsd.shared.protocol import Connection, Role

pytest_plugins = ("runtime_fixtures",)

PROMPT = [40, 41, 42, 43, 44]
LIMITS = Limits(max_new_tokens=150)
COOL = Reading(source="sysfs", power_w=7.0, power_of=BOARD, temperature_c=50.0, throttled=False, cpu_load=0.25)
HOT = Reading(source="sysfs", power_w=7.0, power_of=BOARD, temperature_c=99.0, throttled=True, cpu_load=0.25)


class CheapRows(ToyTarget):
    """A pass takes as long with many rows as with one, on a clock of its own; how many it had is noted."""

    def __init__(self, clock: Hands) -> None:
        super().__init__()
        self.clock = clock
        self.passes: list[int] = []

    def score(self, tokens: Sequence[int], parents: Sequence[int]) -> Any:
        self.passes.append(len(tokens))
        self.clock.time += 0.05 + 0.0001 * len(tokens)
        return super().score(tokens, parents)


class Oracle(Speculator):
    """Is sent the next 20 tokens of the truth before every pass."""

    truth: Sequence[int] = ()
    hands = Hands()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, clock=self.hands, **options)
        self.sent = 0

    def _collect(self, wait: float) -> bool:
        tokens = np.array(self.truth[len(self._tokens) :][:20], np.int64)
        parents = np.arange(self.sent, self.sent + len(tokens)) - 1
        parents[:1] = -1
        steps = np.full(len(tokens), -0.05, np.float32)
        self._drafts.graft(Draft(1, 1, 0, len(self._tokens), self.sent, parents, tokens, steps))
        self.sent += len(tokens)
        return bool(len(tokens))


def test_a_throttled_device_verifies_less_until_it_has_cooled(
    open_one: Callable[..., Runtime], text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = alone(text, PROMPT, ENDLESS, LIMITS)
    telemetry, target = Telemetry(), CheapRows(Oracle.hands)
    monkeypatch.setattr(Oracle, "truth", [*PROMPT, *expected])
    monkeypatch.setattr(runtimes, "Speculator", Oracle)
    runtime = open_one(target, telemetry=lambda: telemetry)
    rows: dict[Reading, list[int]] = {COOL: [], HOT: []}
    said: list[int] = []
    pieces = runtime.generate(PROMPT, sampling=ENDLESS, limits=LIMITS)
    for reading in (COOL, COOL, HOT, HOT, HOT, COOL, COOL):
        telemetry.saw(reading)
        before = len(target.passes)
        said += next(pieces).tokens
        rows[reading] += target.passes[before:]
    said += [token for piece in pieces for token in piece.tokens]
    assert said == expected
    cool, hot = rows[COOL], rows[HOT]
    assert max(hot) == 1 + MOST_THROTTLED  # it still speculates
    assert min(cool[1:]) > 2 * max(hot)  # before and after; the first pass knows no costs yet


def test_without_drafts_throttling_changes_nothing(open_one: Callable[..., Runtime], text: Text) -> None:
    telemetry = Telemetry()
    telemetry.saw(HOT)
    runtime = open_one(telemetry=lambda: telemetry)
    assert run(runtime, PROMPT).token_ids == alone(text, PROMPT)


def talking(figures: Callable[[], dict[str, float]]) -> OneChannel:
    one = OneChannel(figures=figures)
    one.connect()
    return one


def test_a_server_hears_of_the_device_seldom_and_last() -> None:
    asked: list[float] = []

    def figures() -> dict[str, float]:
        asked.append(one.clock.time)
        return {"power_w": 7.0}

    one = talking(figures)
    one.clock.time += STATS_SECONDS
    assert (one.say(), asked) == ([], [])  # nobody has a session
    session = one.channel.session(MODEL)
    one.open()
    assert len(asked) == 1
    session.begin(list(range(9)), 0)
    assert of(one.say(), Stats) == []
    one.clock.time += STATS_SECONDS
    session.commit([1])
    said = one.say()
    assert [type(message).__name__ for message in said] == ["Verdict", "Stats"]
    assert said[-1] == Stats({"power_w": 7.0})
    one.clock.time += STATS_SECONDS - 0.1
    assert one.say() == []
    one.clock.time += 0.2
    assert one.say() == [Stats({"power_w": 7.0})]
    session.close()
    one.say()
    one.clock.time += STATS_SECONDS
    assert one.say() == []
    assert len(asked) == 3


def test_who_knows_nothing_says_nothing() -> None:
    one = talking(dict)
    one.channel.session(MODEL)
    one.open()
    for _ in range(3):
        one.clock.time += STATS_SECONDS
        assert one.say() == []


def test_figures_take_few_bytes() -> None:
    telemetry = Telemetry()
    whole = {"memory_used": 1 << 40, "memory_total": 1 << 41, "gpu_load": 1 / 3}
    telemetry.saw(Reading(power_w=1 / 3, temperature_c=1 / 7, throttled=True, cpu_load=1 / 9, **whole))
    assert len(telemetry.figures()) == 7
    assert len(encode(Stats(telemetry.figures()))) < 256


def test_while_a_private_answer_is_made_the_server_hears_nothing(open_one: Callable[..., Runtime]) -> None:
    telemetry = Telemetry()
    telemetry.saw(COOL)
    runtime = open_one(telemetry=lambda: telemetry)
    assert runtime._figures() == telemetry.figures() != {}
    pieces = runtime.generate(PROMPT, sampling=ENDLESS, private=True)
    next(pieces)
    assert runtime._figures() == {}
    pieces.close()
    assert runtime._figures() == telemetry.figures()


def test_a_gateway_believes_what_can_be() -> None:
    peer, edge = Peer(b"1", "", SMALL), Connection(Role.EDGE)
    peer.take(edge.send(Hello(2, 2, "edge")), (), room=True)
    edge.receive(peer.pop())
    assert peer.figures == {}
    told = {"power_w": 7.5, "throttled": 1.0, "temperature_c": float("inf"), "gpu_load": 1e300, "cpu_load": 0.5}
    others = {f"name {n}": 1.0 for n in range(100)}
    assert peer.take(edge.send(Stats({**told, **others})), (), room=True) == []  # no worker hears of it
    assert peer.figures == {"power_w": 7.5, "throttled": 1.0, "cpu_load": 0.5}
    assert peer.take(edge.send(Stats({"temperature_c": 40.0})), (), room=True) == []
    assert peer.figures == {"temperature_c": 40.0}


def test_a_fleet_is_summed_up() -> None:
    assert fleet([{}, {}]) == {"reporting": 0, "power_w": None, "hottest_c": None, "throttled": 0}
    edges = [{"power_w": 7.5, "throttled": 1.0, "temperature_c": 90.0}, {}, {"power_w": 8.0, "temperature_c": 50.0}]
    assert fleet(edges) == {"reporting": 2, "power_w": 15.5, "hottest_c": 90.0, "throttled": 1}


def test_the_gateways_health_has_the_fleet() -> None:
    gateway = Gateway(SMALL, host="127.0.0.1", port=0)
    peers = [Peer(f"{n}".encode(), "", SMALL) for n in range(3)]
    peers[1].figures = {"power_w": 7.5, "throttled": 1.0}
    gateway._lines = {peer.name: SimpleNamespace(peer=peer) for peer in peers}  # type: ignore[misc]
    told = json.loads(gateway._health(known=True).body)
    assert told["edges"] == {"reporting": 1, "power_w": 7.5, "hottest_c": None, "throttled": 1}


class Opened(Exception):
    pass


@pytest.mark.parametrize(
    ("argv", "made"),
    [
        (["generate", "--prompt", "x"], ProcessTelemetry),
        (["generate", "--prompt", "x", "--no-telemetry"], Telemetry),
        (["generate", "--prompt", "x", "--profile", "orin-nx-16gb-8b"], Telemetry),
        (["chat"], ProcessTelemetry),
        (["chat", "--no-telemetry"], Telemetry),
        (["run", "--port", "0"], ProcessTelemetry),
        (["run", "--port", "0", "--no-telemetry"], Telemetry),
    ],
)
def test_commands_read_sensors_unless_they_are_told_not_to(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], made: type[Telemetry]
) -> None:
    asked: list[Any] = []

    def opened(*args: Any, telemetry: Any, **options: Any) -> None:
        asked.append(telemetry)
        raise Opened

    monkeypatch.setattr(Runtime, "open", opened)
    monkeypatch.setattr(command, "ensure_bundle", lambda model, precision: Path(model))
    monkeypatch.setattr(command.manifest, "read", lambda folder: SimpleNamespace(name="toy"))
    monkeypatch.setattr(command, "recommended", lambda folder, fallback: fallback)
    with pytest.raises(Opened):
        main(argv)
    assert asked == [made]


ASKED: Any = [{"role": "user", "content": "Is this so?"}]


class Steady(Telemetry):
    """Its power is known all the while."""

    def mark(self) -> Any:
        self.saw(COOL)
        return super().mark()


def test_answers_status_and_metrics_tell(tmp_path: Path) -> None:
    runtime = open_runtime(tmp_path)
    runtime.telemetry = telemetry = Steady()
    with served(runtime) as place:
        telemetry.saw(COOL)
        usage = place.chat(messages=ASKED, max_tokens=20, logit_bias={str(EOS): -100})["usage"]["starsd"]
        assert usage["joules"] is not None
        assert usage["tokens_per_joule"] == pytest.approx(20 / usage["joules"], rel=0.2)  # joules are rounded
        status = place.ask("GET", "/v1/starsd/status")[2]
        assert {**status["device"], "age_s": None} == {name: getattr(COOL, name) for name in COOL.__struct_fields__}
        assert status["tokens_per_joule"] == pytest.approx(20 / telemetry.answer_joules)
        metrics = place.ask("GET", "/metrics")[2].decode()
    assert value_of(metrics, 'starsd_edge_device_power_watts{of="board"}') == 7.0
    assert value_of(metrics, "starsd_edge_device_temperature_celsius") == 50.0
    assert value_of(metrics, "starsd_edge_device_throttled") == 0.0
    assert value_of(metrics, "starsd_edge_device_cpu_load_ratio") == 0.25
    assert value_of(metrics, "starsd_edge_answer_energy_joules_total") == pytest.approx(telemetry.answer_joules)
    assert "starsd_edge_device_gpu_load_ratio" not in metrics


def test_unknown_power_is_null(tmp_path: Path) -> None:
    runtime = open_runtime(tmp_path)
    with served(runtime) as place:
        runtime.telemetry.saw(Reading(source="proc", cpu_load=0.5))
        usage = place.chat(messages=ASKED, max_tokens=5)["usage"]["starsd"]
        status = place.ask("GET", "/v1/starsd/status")[2]
        metrics = place.ask("GET", "/metrics")[2].decode()
    assert (usage["joules"], usage["tokens_per_joule"], status["tokens_per_joule"]) == (None, None, None)
    assert (status["device"]["power_w"], status["device"]["cpu_load"]) == (None, 0.5)
    assert "power_watts" not in metrics


def test_an_old_reading_is_not_told(tmp_path: Path) -> None:
    now = [0.0]
    telemetry = Telemetry(lambda: now[0])
    telemetry.saw(Reading(power_w=5.0, power_of=GPU))
    now[0] += STALE + 1
    runtime = open_runtime(tmp_path)
    runtime.telemetry = telemetry
    with served(runtime) as place:
        assert place.ask("GET", "/v1/starsd/status")[2]["device"]["power_w"] is None
        assert "power_watts" not in place.ask("GET", "/metrics")[2].decode()


def value_of(metrics: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", metrics, re.MULTILINE)
    assert found is not None, name
    return float(found[1])
