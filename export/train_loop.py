"""The training loop: batches in a seeded order, a cosine over epochs or minutes, checkpoints, held-out acceptance."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from starsd.export import train_checkpoint
from starsd.export.train_batch import Feeder, accepted, losses
from starsd.export.train_checkpoint import Position, Saved
from starsd.export.train_data import Ints, batches
from starsd.export.train_head import Head
from starsd.export.train_recipe import DEFAULT_EPOCHS, Recipe

Report = Callable[[dict[str, Any]], None]

_BATCH_TOKENS = {"cpu": 1200}  # small ones learn more from the same data; an accelerator needs larger ones to be busy
_MANY_BATCH_TOKENS = 4800
_REPORT_SECONDS = 10.0
_HELD_OUT_TOKENS = 8000  # of a batch that is only measured
_MEASURE_EVERY = 20  # times what measuring takes, or at the end of an epoch


@dataclass(frozen=True)
class Acceptance:
    """Of a chain, on chats that were not trained on: `per_depth` shares of drafts accepted where all above them were;
    `tau` tokens a step, bonus included; `rows` chains tried."""

    per_depth: tuple[float, ...]
    tau: float
    rows: int


@dataclass
class Stop:
    """Which signal asked for an end, if one did."""

    signal: int = 0


class Trainer:
    """One run over `train` chats. `clock` gives the seconds that the run has taken, earlier runs of it included."""

    def __init__(
        self,
        head: Head,
        feeder: Feeder,
        recipe: Recipe,
        *,
        dtype: str,
        train: Ints,
        held: Ints,
        folder: Path,
        fingerprint: str,
        checkpoint_seconds: float,
        clock: Callable[[], float],
        report: Report,
        saved: Saved | None = None,
    ) -> None:
        self.head, self.position = head, Position(prepared=clock())
        self._feeder, self._recipe, self._dtype = feeder, recipe, dtype
        self._train, self._held = train, held
        self._folder, self._fingerprint, self._checkpoint_seconds = folder, fingerprint, checkpoint_seconds
        self._clock, self._report = clock, report
        self._place = next(head.parameters()).device
        self._epochs = recipe.epochs or (0 if recipe.minutes else DEFAULT_EPOCHS)
        self._tokens = recipe.batch_tokens or _BATCH_TOKENS.get(self._place.type, _MANY_BATCH_TOKENS)
        self._optimiser = torch.optim.AdamW(
            head.parameters(), betas=(0.9, 0.95), weight_decay=recipe.weight_decay, fused=True
        )
        self._measured = clock()  # when acceptance was last looked at, and what that took
        self._measuring = 0.0
        if saved is not None:
            self.position = saved.position
            train_checkpoint.restore(saved, head, self._optimiser)

    def run(self) -> None:
        """Train to the end of the schedule. Raises KeyboardInterrupt or SystemExit, with a checkpoint written, when a
        signal asks to stop."""
        with _stopping() as stop:
            if not self.position.step:
                self._tell_held_out()
            while not self._done():
                self._epoch(stop)
            self._checkpoint()

    def measure(self) -> Acceptance:
        """Acceptance on the held-out chats."""
        groups = batches(self._feeder.chats.lengths, self._held, _HELD_OUT_TOKENS, np.random.default_rng(0))
        reached = hit = torch.zeros(self._recipe.steps_ahead, dtype=torch.int64)
        for group in groups:
            with self._computing():
                some_reached, some_hit = accepted(self.head, self._feeder, self._feeder.batch(group))
            reached, hit = reached + some_reached.cpu(), hit + some_hit.cpu()
        rows = int(reached[0])
        shares = (hit / reached.clamp(min=1)).tolist()
        tau = 1 + float(hit.sum()) / max(1, rows)
        return Acceptance(tuple(round(share, 4) for share in shares), round(tau, 4), rows)

    def _epoch(self, stop: Stop) -> None:
        epoch = self.position.epoch
        rng = np.random.default_rng([self._recipe.seed, epoch])
        groups = batches(self._feeder.chats.lengths, self._train, self._tokens, rng)
        saved_at = told_at = self._clock()
        told_step, tokens, sums = self.position.step, 0, torch.zeros(self._recipe.steps_ahead, device=self._place)
        for number in range(self.position.batch, len(groups)):
            share = self._share(number / len(groups))
            if share >= 1:
                return
            tokens += int(self._feeder.chats.lengths[groups[number]].sum())
            sums += self._step(groups[number], share)
            now = self._clock()
            self._move(self.position.step + 1, epoch, number + 1)
            if now - told_at > _REPORT_SECONDS or number + 1 == len(groups):
                mean = (sums / (self.position.step - told_step)).tolist()
                self._tell("train", losses=[round(x, 4) for x in mean], tokens_per_s=round(tokens / (now - told_at), 1))
                told_at, told_step, tokens = self._clock(), self.position.step, 0
                sums.zero_()
            if stop.signal:
                self._checkpoint()
                raise KeyboardInterrupt if stop.signal == signal.SIGINT else SystemExit(128 + stop.signal)
            if now - saved_at > self._checkpoint_seconds:
                self._checkpoint()
                if self._clock() - self._measured > _MEASURE_EVERY * self._measuring:
                    self._tell_held_out()
                told_at = saved_at = self._clock()
        self._move(self.position.step, epoch + 1, 0)
        self._tell_held_out()

    def _move(self, step: int, epoch: int, batch: int) -> None:
        prepared = self.position.prepared
        self.position = Position(step=step, epoch=epoch, batch=batch, seconds=self._clock(), prepared=prepared)

    def _step(self, group: Ints, share: float) -> torch.Tensor:
        """One optimiser step; the loss of each depth, on the device: reading it would make an accelerator wait."""
        recipe = self._recipe
        ramp = min(1.0, (self.position.step + 1) / max(1, recipe.warm_up))
        cosine = 0.5 * (1 + math.cos(math.pi * share))
        for settings in self._optimiser.param_groups:
            settings["lr"] = ramp * (recipe.floor_rate + (recipe.learning_rate - recipe.floor_rate) * cosine)
        # one number more than the epoch's own generator has; not 0, which would give that one again
        rng = np.random.default_rng([recipe.seed, self.position.epoch, self.position.batch + 1])
        batch = self._feeder.batch(group, recipe.later_share, rng)
        with self._computing():
            each = torch.stack(losses(self.head, self._feeder, batch))
        decay = torch.tensor([recipe.step_decay**j for j in range(recipe.steps_ahead)], device=self._place)
        self._optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward((each * decay).sum())
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), recipe.clip)
        self._optimiser.step()
        return each.detach()

    def _computing(self) -> torch.autocast:
        return torch.autocast(self._place.type, torch.bfloat16, enabled=self._dtype == "bf16")

    def _share(self, of_epoch: float) -> float:
        """How much of the schedule is over, 0 … 1."""
        by_data = (self.position.epoch + of_epoch) / self._epochs if self._epochs else 0.0
        prepared, limit = self.position.prepared, 60 * self._recipe.minutes
        by_time = (self._clock() - prepared) / max(limit - prepared, 1e-9) if limit else 0.0
        return min(1.0, max(by_data, by_time))

    def _done(self) -> bool:
        return self._share(0.0) >= 1

    def _checkpoint(self) -> None:
        train_checkpoint.write(
            self._folder, self._fingerprint, self._dtype, self._recipe, self.position, self.head, self._optimiser
        )

    def _tell(self, event: str, **values: Any) -> None:
        place = self.position
        row = {"event": event, "step": place.step, "epoch": place.epoch, "seconds": round(self._clock(), 1)}
        self._report({**row, "share": round(self._share(0.0), 4), **values})

    def _tell_held_out(self) -> None:
        started = self._clock()
        found = self.measure()
        self._measured = self._clock()
        self._measuring = self._measured - started
        self._tell("held_out", per_depth=list(found.per_depth), tau=found.tau, rows=found.rows)


@contextlib.contextmanager
def _stopping() -> Iterator[Stop]:
    """Note SIGINT and SIGTERM instead of dying from them; a second one of the same kind does as usual."""
    stop = Stop()
    before: dict[int, Any] = {}

    def note(number: int, _: object) -> None:
        stop.signal = number
        signal.signal(number, before[number])

    with contextlib.suppress(ValueError):  # not the main thread: its owner decides
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, note)
    try:
        yield stop
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)


def stopwatch(spent: float) -> Callable[[], float]:
    """A clock of a run that has taken `spent` seconds before."""
    start = time.monotonic() - spent
    return lambda: time.monotonic() - start
