"""Random schedules of a whole star: whatever links, servers and conversations do, every token is plain decoding's.

    python tests/schedules.py --count 10000 --seed 1

A schedule is drawn from its seed alone, and runs the same every time. A finding is printed with its seed, and ends the
run with status 1; `--count 1 --seed S` repeats it.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from star import DEVICE, WIDE, WINDOW, Broken, Star, truth
from tiny_session import EOS, VOCAB, write_text_files

from starsd.edge.policy import Policy
from starsd.edge.session import Session, fit
from starsd.edge.text import Text
from starsd.scripts.link_model import LinkSettings
from starsd.scripts.virtual_star import VirtualLine
from starsd.server.limits import ServerLimits
from starsd.shared.config import Limits, Sampling

CALM_SECONDS = 14.0  # after which everything has been found out, opened again and said
UNNOTICED = (0.0, 0.0, 0.5, 8.0)  # seconds that a server believes in a connection that the edge has given up


class Schedule:
    """One run; `counts` say what happened in it."""

    def __init__(self, seed: int, text: Text) -> None:
        self.text, self.counts = text, Counter[str]()
        self._random = draw = random.Random(f"star {seed}")
        self._roomy = draw.random() < 0.7  # slots for everybody
        limits = ServerLimits(
            slots=24 if self._roomy else draw.randint(1, 3),
            window=WINDOW,
            entries=draw.choice([8, 64]),
            nodes=draw.choice([8, 20, 36]),
            depth=draw.choice([2, 7]),
            top_k=4,
            max_nodes=draw.choice([60, 240]),
            nodes_per_draft=draw.choice([1, 12]),
            retry_seconds=0.3,
        )
        self.star = Star(
            limits,
            draw.choice(["batched", "batched", "fifo"]),
            draw.choice([0.0005, 0.004, 0.05]),
            unsure=draw.random() < 0.4,
            device=draw.choice([DEVICE, WIDE]),
            mistaken=seed % 5 == 0,
        )
        self._shares_noise = seed % 4 > 0
        self._left = 0  # conversations that are under way
        self._calm = False
        self.lines = [self._line(f"edge {number}", number) for number in range(draw.randint(1, 3))]

    def run(self) -> Counter[str]:
        """Raises AssertionError for a wrong token."""
        with self.star as star:
            for number, line in enumerate(self.lines):
                if self._random.random() < 0.9:
                    line.connect()
                star.clock.spawn(self._disturber(self._disturb_line, line), f"line {number}", daemon=True)
                for part in range(self._random.randint(1, 2)):
                    draw = random.Random(self._random.random())
                    self._left += 1
                    star.clock.spawn(lambda line=line, draw=draw: self._converse(line, draw), f"edge {number}.{part}")
            star.clock.spawn(self._disturber(self._disturb_server), "disturber", daemon=True)
            star.clock.run()
            assert not star.drafter.wrong, star.drafter.wrong[0]
            self.counts["features"] += star.drafter.landed
            self.counts["drawn"] += star.drafter.drawn
        return self.counts

    def _line(self, name: str, number: int) -> VirtualLine:
        draw = self._random
        settings = LinkSettings(
            rtt_ms=draw.choice([0, 2, 20, 80, 200, 500, 2000]),
            jitter_ms=draw.choice([0, 0, 5, 200]),
            up_kbit=draw.choice([16, 64, 1000, 100_000]),
            down_kbit=draw.choice([64, 1000, 100_000]),
            queue_bytes=draw.choice([0, 0, 600]),
            seed=draw.randrange(2**20),
        )
        line: VirtualLine = self.star.line(name, settings, number)
        return line

    # what goes wrong

    def _disturber(self, act: Callable[..., None], *arguments: Any) -> Callable[[], None]:
        draw, every = random.Random(self._random.random()), self._random.choice([0.1, 0.5, 2.0, 5.0, 5.0, 1e6])

        def run() -> None:
            while not self._calm:
                self.star.clock.sleep(draw.expovariate(1 / every))
                if not self._calm:
                    act(draw, *arguments)

        return run

    def _disturb_line(self, draw: random.Random, line: VirtualLine) -> None:
        clock = self.star.clock
        what = draw.choice(["set", "stall", "hole", "cut", "end", "reset"])
        self.counts[what] += 1
        seconds = draw.choice([0.01, 0.2, 2.0, 11.0])
        match what:
            case "set":
                line.link.set(rtt_ms=draw.choice([0, 20, 500]), up_kbit=draw.choice([16, 1000, 100_000]))
            case "stall":
                line.link.stall(seconds)
            case "hole":
                line.link.cut("hole")
                clock.sleep(seconds)
                line.link.cut("none")
            case "cut":  # what is under way is lost, in the middle of whatever was said
                line.link.cut("close")
                line.disconnect(draw.choice(UNNOTICED))
                clock.sleep(seconds)
                line.link.cut("none")
            case "end":  # what is under way still arrives
                line.disconnect(draw.choice(UNNOTICED))
                clock.sleep(seconds)
            case "reset":  # the server finds out first
                self.star.server.disconnect(line._peer)
                clock.sleep(seconds)
                line.disconnect()
        line.connect()

    def _disturb_server(self, draw: random.Random) -> None:
        what = draw.choice(["restart", "replace", "slow"])
        self.counts[what] += 1
        match what:
            case "restart":
                self.star.server.restart()
            case "replace":
                self.star.server.replace([self.star.head()])
            case "slow":
                self.star.pass_seconds = draw.choice([0.0005, 0.03, 0.4])

    def _calm_down(self) -> None:
        self._calm = True
        self.star.pass_seconds = 0.002
        for line in self.lines:
            line.link.cut("none")
            line.link.set(rtt_ms=20, jitter_ms=0, up_kbit=100_000, down_kbit=100_000)
            self.star.clock.call_at(self.star.clock.now() + 0.1, line.connect)

    # what is said

    def _converse(self, line: VirtualLine, draw: random.Random) -> None:
        """Turns of one conversation, or of several one after the other; then one more in peace."""
        clock = self.star.clock
        for again in range(draw.choice([1, 1, 2])):
            policy = draw.choice([Policy.NEVER_WAIT, Policy.NEVER_WAIT, Policy.STOP_AND_WAIT, Policy.PLAIN])
            context, noisy = draw.choice([4096, 4096, 200]), draw.random() < 0.3
            session = self.star.session(
                line,
                self.text,
                policy,
                ngrams=draw.random() < 0.4,
                noisy=noisy,
                context=context,
                share_noise=self._shares_noise,
            )
            said: list[int] = []
            for _ in range(draw.randint(1, 3)):
                said = self._turn(session, _edited(said, draw), draw)
                clock.sleep(draw.choice([0.0, 0.0, 0.5, 3.0]))
            if again == 0 and draw.random() < 0.5 and session.speculator.remote is not None:
                session.speculator.remote.close()
        self._left -= 1
        if not self._left:
            self._calm_down()
        while not self._calm:
            clock.sleep(0.5)
        clock.sleep(CALM_SECONDS)
        self._last_turn(line, session, _edited(said, draw), draw)

    def _turn(
        self, session: Session, prompt: list[int], draw: random.Random, sampling: Sampling | None = None
    ) -> list[int]:
        """Prompt and answer, which may be left unfinished."""
        sampling = sampling or _sampling(draw)
        limits = Limits(max_new_tokens=draw.choice([1, 6, 25, 25]), overflow="truncate")
        taken = draw.randint(1, 8) if not self._calm and draw.random() < 0.15 else 10**9
        prompt = fit(prompt, limits, session.target.context)
        expected = truth(prompt, min(limits.max_new_tokens, session.target.context - len(prompt) + 1), sampling)
        breaks = not self._calm and draw.random() < 0.1
        session.target._target.breaks_in = draw.randint(1, 12) if breaks else 0  # type: ignore[attr-defined]
        pieces = session.generate(prompt, sampling, limits)
        ids: list[int] = []
        try:
            for number, piece in enumerate(pieces):
                ids += piece.tokens
                self.counts["passes"] += 1
                if piece.outcome is not None:
                    assert ids == piece.outcome.token_ids == expected
                    self.counts["remote"] += piece.outcome.accepted_remote
                    self.counts["ngram"] += piece.outcome.accepted_ngram
                elif number == taken:
                    break
        except Broken:
            self.counts["broken"] += 1
        pieces.close()
        assert ids == expected[: len(ids)], f"got {ids}, expected {expected}"
        self.counts["tokens"] += len(ids)
        return [*prompt, *ids]

    def _last_turn(self, line: VirtualLine, session: Session, prompt: list[int], draw: random.Random) -> None:
        """With the network in order the server knows everything again, and drafts."""
        remote = session.speculator.remote
        before = 0 if remote is None else remote.bytes_down
        self._turn(session, prompt, draw, Sampling(logit_bias={EOS: -100}))
        self.star.clock.sleep(2.0)
        if remote is None or remote._closing or not self._roomy:
            return
        assert remote.live, f"not live in peace: {line.channel.notice}"
        assert remote.bytes_down > before, "no draft came in peace"
        (served,) = [s for s in self.star.server.sessions if (s.peer, s.number) == (line._peer, remote.number)]
        assert served.live.base == len(remote._tokens)
        held, rows = remote.rows.held, served.live.rows
        held = held[(held >= rows._known) & (held < len(remote._tokens) - 1)]
        waiting = {row for queued, _ in served.live._queue for row in queued.tolist()}  # for credit, with fifo
        known = waiting | set(rows._held[rows._true].tolist())
        missing = sorted(row for row in held.tolist() if row not in known and row > rows.count - WINDOW)
        assert not missing, f"rows {missing} were never sent"


def _edited(said: list[int], draw: random.Random) -> list[int]:
    """The next prompt: the conversation goes on, from where it was or from further back, or another begins."""
    fresh = [draw.randrange(2, VOCAB) for _ in range(draw.choice([1, 3, 10, 10, 90, 300]))]
    match draw.choice(["on", "on", "back", "other", "same"]):
        case "on":
            return said + fresh
        case "back":
            return said[: draw.randint(0, len(said))] + fresh
        case "same" if said:
            return said[: draw.randint(1, len(said))]
    return fresh


def _sampling(draw: random.Random) -> Sampling:
    if draw.random() < 0.4:
        return Sampling(logit_bias={EOS: draw.choice([-100.0, 0.0])})
    return Sampling(
        temperature=draw.choice([0.3, 0.8, 1.5]),
        top_k=draw.choice([0, 0, 8]),
        top_p=draw.choice([1.0, 0.9]),
        repetition_penalty=draw.choice([1.0, 1.2]),
        presence_penalty=draw.choice([0.0, 0.4]),
        frequency_penalty=draw.choice([0.0, 0.3]),
        logit_bias={EOS: draw.choice([-100.0, -3.0])},
        seed=draw.randrange(2**40),
    )


def run(seed: int, text: Text) -> Counter[str]:
    """Run the schedule of this seed. Raises AssertionError naming it."""
    try:
        return Schedule(seed, text).run()
    except BaseException as error:
        raise AssertionError(f"schedule {seed}: {type(error).__name__}: {error}") from error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1, help="of the first")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no other begins")
    options = parser.parse_args()
    counts, began, done = Counter[str](), time.monotonic(), 0
    with tempfile.TemporaryDirectory() as place:
        text = Text.open(write_text_files(Path(place)))
        for seed in range(options.seed, options.seed + options.count):
            if time.monotonic() - began > options.seconds:
                break
            try:
                counts += run(seed, text)
            except AssertionError as error:
                print(error)
                return 1
            done += 1
            if done % 500 == 0:
                print(f"{done} in {time.monotonic() - began:.0f} s", file=sys.stderr)
    print(f"{done} schedules in {time.monotonic() - began:.0f} s, no token changed: {dict(sorted(counts.items()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
