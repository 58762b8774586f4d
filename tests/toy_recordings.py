"""Recorded answers of the model of `bigram`, and its drafter as a head of a virtual star."""

from __future__ import annotations

from pathlib import Path

from bigram import FINGERPRINT, bigram_head
from star import MODEL, PROMPT, MarkedDrafter, MarkedTarget
from tiny_session import EOS

from starsd.edge.recordings import Header, Recordings, Run, record_run
from starsd.scripts.cli import main
from starsd.scripts.virtual_clock import VirtualClock
from starsd.scripts.virtual_head import DraftCost
from starsd.scripts.virtual_star import ChargedDrafter
from starsd.server.limits import ServerLimits
from starsd.server.served import Head


class ToyHead:
    """What `VirtualHead` is to a real head."""

    projector = None

    def on(self, clock: VirtualClock, limits: ServerLimits, cost: DraftCost) -> Head:
        return bigram_head(ChargedDrafter(MarkedDrafter(limits.slots, limits.window), clock, cost.seconds))


def toy_recordings() -> Recordings:
    runs = tuple(record_run(MarkedTarget(), i, [*PROMPT, i], [EOS], 40) for i in range(4))
    about = Header(
        model="toy",
        fingerprint=FINGERPRINT,
        precision="fp32",
        shape=MODEL.shape,
        features=MODEL.features,
        eos=(EOS,),
        runs=tuple(Run(run.id, run.prompt, len(run.tokens), run.ended) for run in runs),
    )
    return Recordings(about, runs)


def record_one(bundle: Path, folder: Path) -> Path:
    """A short answer of a real engine, recorded."""
    prompts, out = folder / "prompts.jsonl", folder / "recording.npz"
    prompts.write_text('{"id": 1, "prompt": "Count from one to twelve."}\n')
    argv = ["bench", "record", "--model", str(bundle), "--prompts", str(prompts), "--max-new-tokens", "32"]
    assert main([*argv, "--out", str(out)]) == 0
    return out
