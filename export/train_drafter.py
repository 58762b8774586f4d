"""`starsd-export train-drafter`: chats → taps and labels (train_store) → a trained head (train_loop) → its folder.

    OUT/cache        chats with what the target said about them; safe to delete when the head is done
    OUT/checkpoint   the newest state of training, from which the same command goes on
    OUT/chats.npz    chats that the target wrote, as `--data` takes them
    OUT/…            the head: config.json, model.safetensors, README.md, recording.npz; and phrases.npz for devices

`minutes` is for everything but the recording at the end (two to four times 128 tokens, one by one). Preparing the chats
may take half of it: those not ready by then are left out.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import msgspec
import numpy as np
import torch

from starsd.export import train_checkpoint
from starsd.export.checkpoint import Checkpoint
from starsd.export.phrases import count_phrases, write_phrases
from starsd.export.pull import pull
from starsd.export.train_batch import Feeder, draft_ids
from starsd.export.train_data import Chats, Ints, choose, held_out, read_chats, require_enough, write_chats
from starsd.export.train_head import Head, HeadShape, initialise
from starsd.export.train_loop import Report, Trainer, stopwatch
from starsd.export.train_recipe import GENERATED, Recipe, Sources, difference
from starsd.export.train_save import chain_accepted, record, save_head, write_card, write_recording
from starsd.export.train_start import start_from
from starsd.export.train_store import Store
from starsd.export.train_target import TORCH_DTYPES, BatchTarget, fingerprint
from starsd.shared.architecture import require_plain
from starsd.shared.console import Progress, no_progress
from starsd.shared.errors import UsageError
from starsd.shared.prompts import read_prompts
from starsd.shared.rope import Rope

_CHUNK = {"cpu": (64, 4096), "cuda": (512, 65536)}  # chats between commits, padded tokens of a pass
_TRIES = 16
_BF16_GAIN = 0.8  # of fp32's time that bf16 may take: converting to it costs some
_HALF = 0.5  # of the minutes may go into preparation


class Result(msgspec.Struct, frozen=True):
    """What came out; `per_depth` and `tau` as in train_loop.Acceptance, `bytes` of model.safetensors."""

    head: str
    bytes: int
    steps: int
    epochs: int
    seconds: float
    per_depth: tuple[float, ...]
    tau: float


def train_drafter(
    model: str, out: Path, recipe: Recipe, sources: Sources, report: Report, progress: Progress = no_progress
) -> Result:
    """Train an EAGLE-3 head for a target; goes on from OUT/checkpoint when there is one.

    Raises UsageError (data or options that do not fit, another run's folder), ModelError (a target that is not whole or
    no Llama) and StorageError.
    """
    device = open_device(sources.device)
    folder = pull(model, progress)
    source, chats = Checkpoint(folder), None
    require_plain(source.architecture, "training")
    if sources.data is not None:
        chats = choose(read_chats(sources.data, source.shape.vocab), sources.tokens, recipe.longest, recipe.seed)
    name = _identity(source, recipe, sources, chats)
    out.mkdir(parents=True, exist_ok=True)
    saved = train_checkpoint.read(out / "checkpoint", name)
    if saved is not None and (changed := difference(recipe, saved.recipe)):
        raise UsageError(f"{out} has a checkpoint of another recipe: {changed}: choose another --out or delete it")
    dtype = saved.dtype if saved is not None else choose_dtype(recipe.dtype, device)
    clock = stopwatch(saved.position.seconds if saved is not None else 0.0)

    target = BatchTarget(folder, device, TORCH_DTYPES[dtype])
    top = min(recipe.soft_labels, target.shape.vocab)
    store = Store(out / "cache", name, target.width, top, int(sources.cache_gb * 1e9))
    if not store.complete:
        limit = time.monotonic() + (60 * recipe.minutes * _HALF if recipe.minutes else float("inf"))
        before, began = store.tokens, clock()
        if chats is None:
            _write(target, store, recipe, sources, limit, progress)
        else:
            read_through(target, store, chats, limit, progress)
        rate = (store.tokens - before) / max(clock() - began, 1e-9)
        report({"event": "prepared", "chats": store.chats, "tokens": store.tokens, "tokens_per_s": round(rate, 1)})
    rows = store.load()
    require_enough(len(rows.chats))
    if chats is None:
        write_chats(out / "chats.npz", rows.chats)

    order = np.random.default_rng(recipe.seed).permutation(len(rows.chats))
    held, train = np.split(order, [held_out(len(order), recipe.held_out)])
    draft = draft_ids(rows.chats.pick(train), recipe.draft_vocab, target.shape.vocab, recipe.user_weight)
    head = _head(source, draft, recipe.seed, sources.start)
    feeder = Feeder(rows, target, draft, recipe.steps_ahead, recipe.user_weight)
    trainer = Trainer(
        head.to(device),
        feeder,
        recipe,
        dtype=dtype,
        train=train,
        held=held,
        folder=out / "checkpoint",
        fingerprint=name,
        checkpoint_seconds=sources.checkpoint_seconds,
        clock=clock,
        report=report,
        saved=saved,
    )
    trainer.run()
    found = trainer.measure()

    size = save_head(out, head, source, draft, recipe.window)
    write_phrases(out / "phrases.npz", count_phrases(rows.chats.pick(train), target.shape.vocab))
    arrays, text, features = record(target, rows, held)
    agreed = chain_accepted(head, target.embedding, draft, text, features, recipe.steps_ahead)
    write_recording(out / "recording.npz", {**arrays, "chain_accepted": agreed})
    place = trainer.position
    facts = {
        "Chats": f"{len(train):,} of {int(rows.chats.lengths[train].sum()):,} tokens, {len(held)} more held out",
        "Draft vocabulary": f"{len(draft):,} of {target.shape.vocab:,}",
        "Training": f"{place.step:,} steps, {place.epoch} whole epochs, {place.seconds / 60:.0f} minutes, {dtype}, "
        + device.type,
    }
    if sources.start is not None:
        facts["Started from"] = "an earlier head of this target"
    label = model if not Path(model).is_dir() else Path(model).resolve().name
    write_card(out, name=label, recipe=recipe, facts=facts, found=found, accepted=agreed.tolist())
    return Result(str(out), size, place.step, place.epoch, round(clock(), 1), found.per_depth, found.tau)


def _head(source: Checkpoint, draft: Ints, seed: int, start: Path | None) -> Head:
    """Where training begins."""
    head = Head(HeadShape.of(source, len(draft)), head_rope(source))
    initialise(head, source, torch.from_numpy(draft), seed)
    if start is not None:
        start_from(head, start, draft)
    return head


def open_device(name: str) -> torch.device:
    """Raises UsageError for a device that this machine or this build of torch does not have."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def choose_dtype(wanted: str, device: torch.device) -> str:
    """`auto`: bf16, except on CPUs that gain little by it (those without bf16 matrix units), which is tried out."""
    if wanted != "auto":
        return wanted
    if device.type != "cpu":
        return "bf16"
    # in turns and often, since a moment in which others work would decide for hours
    rounds = [{name: _multiplying(dtype) for name, dtype in TORCH_DTYPES.items()} for _ in range(_TRIES)]
    seconds = {name: min(each[name] for each in rounds) for name in TORCH_DTYPES}
    return "bf16" if seconds["bf16"] < _BF16_GAIN * seconds["fp32"] else "fp32"


def head_rope(source: Checkpoint) -> Rope:
    """The target's base without its scaling: what official heads can say in their config."""
    rope = source.rope
    return Rope("default", rope.theta, rope.head_dim, rope.context, rope.context)


def read_through(
    target: BatchTarget, store: Store, chats: Chats, deadline: float = float("inf"), progress: Progress = no_progress
) -> None:
    """Run chats through the target into the store, in their order, going on behind those it has."""
    many, tokens = _CHUNK.get(target.device.type, _CHUNK["cuda"])
    while store.chats < len(chats) and time.monotonic() < deadline:
        chunk = np.arange(store.chats, min(store.chats + many, len(chats)))
        done: dict[int, tuple[torch.Tensor, ...]] = {}
        by_length = chunk[np.argsort(chats.lengths[chunk], kind="stable")]
        for group in _groups(by_length, chats.lengths, tokens):
            done |= _pass(target, chats, group, store.top)
        for chat in chunk.tolist():
            place = chats.rows(chat)
            taps, ids, probs = done[chat]
            parts = (torch.from_numpy(chats.tokens[place]), torch.from_numpy(chats.roles[place]))
            store.append(*parts, taps, (ids, probs))
        store.commit()
        progress("reading chats", store.chats, len(chats))
    store.commit(complete=True)


def _pass(target: BatchTarget, chats: Chats, group: Ints, top: int) -> dict[int, tuple[torch.Tensor, ...]]:
    """Taps and likeliest tokens of some chats, each by its number."""
    lengths = chats.lengths[group]
    ids = np.zeros((len(group), lengths.max()), np.int64)
    for row, chat in enumerate(group):
        ids[row, : lengths[row]] = chats.tokens[chats.rows(int(chat))]
    taps, last = target.forward(torch.from_numpy(ids).to(target.device))
    real = torch.from_numpy(np.arange(ids.shape[1]) < lengths[:, None]).to(target.device)
    best = target.top(last[real], top)
    parts = [torch.split(part.cpu(), lengths.tolist()) for part in (taps[real].to(torch.bfloat16), *best)]
    return {int(chat): tuple(part[row] for part in parts) for row, chat in enumerate(group)}


def _groups(ordered: Ints, lengths: Ints, tokens: int) -> list[Ints]:
    """Chats of rising length in groups of at most `tokens` with their padding."""
    groups, begin = [], 0
    for place in range(1, len(ordered) + 1):
        if place == len(ordered) or (place + 1 - begin) * lengths[ordered[place]] > tokens:
            groups.append(ordered[begin:place])
            begin = place
    return groups


def _write(
    target: BatchTarget, store: Store, recipe: Recipe, sources: Sources, deadline: float, progress: Progress
) -> None:
    from starsd.export import train_chat
    from starsd.export.train_generate import LONGEST, write_chats

    text = train_chat.ChatText(target.checkpoint.folder)
    rng = np.random.default_rng([recipe.seed, store.chats])
    if sources.prompts is None:
        scripts = train_chat.invented(text, rng)
    else:
        scripts = train_chat.asked(text, [prompt.turns for prompt in read_prompts(sources.prompts)], rng)
    write_chats(
        target,
        scripts,
        text.ends,
        store,
        tokens=sources.tokens or GENERATED,
        chats=sources.batch_chats,
        longest=min(LONGEST, recipe.longest, target.shape.context),
        deadline=deadline,
        seed=recipe.seed,
        progress=progress,
    )


def _identity(source: Checkpoint, recipe: Recipe, sources: Sources, chats: Chats | None) -> str:
    """Names target and chats: what a cache or checkpoint of one is no use to another for. Hexadecimal."""
    digest = hashlib.sha256(fingerprint(source).encode())
    if chats is not None:
        digest.update(chats.tokens.tobytes() + chats.roles.tobytes() + chats.offsets.tobytes())
    else:
        prompts = sources.prompts.read_bytes() if sources.prompts is not None else b""
        digest.update(f"{sources.tokens or GENERATED} {recipe.seed} {recipe.longest}".encode() + prompts)
    return digest.hexdigest()


def _multiplying(dtype: torch.dtype) -> float:
    """Seconds that a product of a layer's size takes."""
    a, b = torch.ones(512, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
    start = time.perf_counter()
    torch.matmul(a, b)
    return time.perf_counter() - start
