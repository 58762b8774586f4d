"""One pass for any number of sessions: ragged contexts, ragged trees, sessions that join and leave between passes.

What rows share is the arithmetic of `EagleLayer`; what tells them apart is the slot that each row's K/V, feed and
output belong to. Attention runs over (sessions, rows padded to the longest), everything else over the rows themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from starsd.server.drafter import Draft, DynamicTree, Floats, Ints, SlotLimits, Total, each
from starsd.server.dynamic_tree import SlotGrowth, grow
from starsd.server.eagle_layer import EagleLayer
from starsd.server.live_session import LiveSession, Plan
from starsd.server.live_tree import LiveTree
from starsd.server.slots import SlotPool
from starsd.shared.errors import ModelError, UsageError

Work = Sequence[tuple[LiveSession, int]]

LANDING = 512  # rows of true features that one pass takes in, over all sessions
_ROUND = 8  # passes have a multiple of so many rows: matrix kernels are made once for each size


@dataclass(frozen=True)
class _Batch:
    """Rows of one pass beside each other, int64 (n,); `place` is where each lies among (sessions, rows) padded."""

    tokens: Ints
    positions: Ints
    columns: Ints
    sources: Ints
    targets: Ints
    slots: Ints
    place: Ints


class BatchDrafter:
    """A head's weights and the memory of all its sessions."""

    def __init__(self, layer: EagleLayer, limits: SlotLimits | None = None, shape: DynamicTree | None = None) -> None:
        """`shape` gives the children a node has and how many levels are expanded, for live trees."""
        self.layer = layer
        limits, own = limits or SlotLimits(), layer.spec.window
        # a head that was trained with a sliding window has its own
        self.limits = replace(limits, window=min(limits.window, own)) if own else limits
        self.shape = shape or DynamicTree()
        self.pool = SlotPool(layer, self.limits)
        self._draft_ids = None if layer.to_target is None else layer.to_target.cpu().numpy()
        if self.shape.top_k > layer.spec.draft_vocab:
            vocab = layer.spec.draft_vocab
            raise UsageError(f"top_k is {self.shape.top_k}, expected at most the draft vocabulary's {vocab}")

    def open(self, *, projected: bool = False) -> LiveSession:
        """A new session; `projected` when its features went through the head's `fc` on the edge (`edge/projector.py`).

        Raises CapacityError when all slots are taken.
        """
        spec = self.layer.spec
        tree = LiveTree(0, top_k=self.shape.top_k, depth=self.shape.depth, entries=self.limits.entries)
        return LiveSession(
            self.pool.acquire(),
            self.limits,
            tree,
            vocab=spec.vocab,
            width=spec.hidden if projected else spec.features.width,
            projected=projected,
            close=self.pool.release,
            draft_ids=self._draft_ids,
        )

    @torch.inference_mode()
    def advance(self, work: Work, total: Total = None, *, official: bool = False) -> int:
        """One pass over sessions, each with the rows that it may use; how many rows ran, features not counted.

        Trees rest at `total` nodes, one number for all or one for each. A session with nothing to do takes no part. 0
        means that none had anything to do.
        """
        sessions = [session for session, _ in work]
        self._settle(sessions)
        planned = [
            (session, session.plan(budget, nodes, official=official))
            for (session, budget), nodes in zip(work, each(total, len(work), self.shape.total), strict=True)
        ]
        return self._run([(session, plan) for session, plan in planned if plan is not None])

    @torch.inference_mode()
    def trees(self, sessions: Sequence[LiveSession], shape: DynamicTree) -> list[Draft]:
        """The official tree of each session at once, as `EagleSession.draft` gives it. Their live trees start anew."""
        if not sessions:
            return []
        if shape.depth * shape.top_k > self.limits.entries:
            need = shape.depth * shape.top_k
            raise UsageError(f"tree expands {need} nodes, expected at most the {self.limits.entries} entries of a slot")
        for session in sessions:
            session.restart()
        late = list(sessions)
        while late := [session for session in late if session.waiting or session.behind]:
            if not self.advance([(session, 1) for session in late]) and not any(session.waiting for session in late):
                break
        if faults := [session.fault for session in sessions if session.fault]:
            raise ModelError(faults[0])
        if late or not all(session.ready for session in sessions):
            raise UsageError("nothing to draft from, expected features of the newest rows")
        slots = torch.tensor([session.slot for session in sessions], device=self.layer.device)
        tokens, parents, scores = grow(
            self.layer,
            SlotGrowth(self.pool, self.layer, sessions, shape).run,
            self.pool.hidden[slots, self.pool.output],
            shape,
            lambda level: self._noise([(session, session.rows.last + level - 1) for session in sessions]),
        )
        ids, above, sums = self.layer.target_ids(tokens).cpu().numpy(), parents.cpu().numpy(), scores.cpu().numpy()
        if np.isnan(sums).any():
            raise ModelError("the head's outputs are not numbers: load it as bf16 or fp32")
        for session in sessions:
            session.restart()
        return [
            Draft(np.append(session.rows.root, i), np.append(-1, a), np.append(np.float32(0), s))
            for session, i, a, s in zip(sessions, ids, above, sums, strict=True)
        ]

    def _settle(self, sessions: Sequence[LiveSession]) -> None:
        """Put rows that tree nodes became in their places, then take in true features."""
        moves: list[tuple[int, int, int]] = []
        pointers: list[tuple[int, int, int]] = []
        for session in sessions:
            moved, (latent, fed) = session.take_moves()
            moves += [(session.slot, source, target) for source, target in moved]
            if (latent, fed) != (self.pool.latent, self.pool.fed):
                pointers.append((session.slot, latent, fed))
        if moves:
            slots, sources, targets = self._index(np.array(moves).T)
            self.pool.write(slots, targets, self.pool.keys[slots, :, sources], self.pool.values[slots, :, sources])
        if pointers:
            slots, latent_at, fed_at = self._index(np.array(pointers).T)
            latents, feeds = self.pool.hidden[slots, latent_at], self.pool.hidden[slots, fed_at]
            self.pool.hidden[slots, self.pool.latent], self.pool.hidden[slots, self.pool.fed] = latents, feeds
        room, landing = LANDING, []
        late = [session for session in sessions if session.waiting]
        for share in (LANDING // max(len(late), 1), LANDING):  # whoever has much must not keep others waiting
            for session in late:
                own = min(room, max(share, 1))
                while (chunk := session.take_features(own)) is not None:
                    landing.append((session, *chunk))
                    own, room = own - len(chunk[0]), room - len(chunk[0])
        for projected in (False, True):
            self._land([item for item in landing if item[0].projected == projected], projected)

    def _land(self, landing: list[tuple[LiveSession, Ints, Floats]], projected: bool) -> None:
        if not landing:
            return
        rows = np.concatenate([rows for _, rows, _ in landing])
        tokens = np.concatenate([session.rows.following(rows) for session, rows, _ in landing])
        columns = np.concatenate([session.columns(rows) for session, rows, _ in landing])
        slots = np.concatenate([np.full(len(rows), session.slot) for session, rows, _ in landing])
        features = torch.from_numpy(np.concatenate([features for *_, features in landing]))
        hidden = features.to(self.layer.device, self.layer.dtype) if projected else self.layer.fuse(features)
        slot_index, column_index, token_index, positions = self._index(np.stack([slots, columns, tokens, rows]))
        entered = self.layer.enter(token_index, hidden, positions)
        self.pool.write(slot_index, column_index, entered.keys, entered.values)
        end = 0
        for session, own, _ in landing:
            end += len(own)
            if session.landed(own):
                self.pool.hidden[session.slot, self.pool.fed] = hidden[end - 1]

    def _run(self, work: list[tuple[LiveSession, Plan]]) -> int:
        if not work:
            return 0
        work.sort(key=lambda item: item[0].slot)
        counts = [len(plan.tokens) for _, plan in work]
        widest, count = max(counts), sum(counts)
        unseen, entries, places = self._unseen(work, widest)
        batch = _gather(work, counts, widest)
        slots, columns, sources, targets, place, positions, tokens = self._index(
            np.stack([getattr(batch, name) for name in _ORDER])
        )
        layer, pool = self.layer, self.pool
        hidden = pool.hidden[slots, sources]
        entered = layer.enter(tokens, hidden, positions)
        pool.write(slots, columns, entered.keys, entered.values)
        heads, width = entered.queries.shape[1:]
        padded = entered.queries.new_zeros(len(work) * widest, heads, width)
        padded[place] = entered.queries
        keys, values = pool.window([session.slot for session, _ in work], entries, places)
        mask = torch.from_numpy(unseen).to(layer.device)
        mixed = layer.attend(padded.view(len(work), widest, heads, width), keys, values, mask)
        output = layer.leave(mixed.flatten(0, 1)[place], entered.residual)
        pool.hidden[slots, targets] = layer.latent(output)
        of_rows = [end - 1 for end, (_, plan) in zip(np.cumsum(counts), work, strict=True) if plan.nodes is None]
        if of_rows:
            index = self._index(np.array(of_rows))
            pool.hidden[slots[index], pool.fed] = hidden[index]
            pool.hidden[slots[index], pool.output] = output[index]
        of_slot = {session.slot: session for session, _ in work}
        rows = zip(batch.slots.tolist(), batch.positions.tolist(), strict=True)
        noise = self._noise([(of_slot[slot], position) for slot, position in rows])
        ids, steps = layer.best(output, self.shape.top_k, noise)
        found, scores = layer.target_ids(ids).cpu().numpy(), steps.cpu().numpy()
        end = 0
        for (session, plan), own in zip(work, counts, strict=True):
            session.finish(plan, found[end : end + own], scores[end : end + own])
            end += own
        return count

    def _noise(self, rows: Sequence[tuple[LiveSession, int]]) -> torch.Tensor | None:
        """What rows of these sessions at these positions add to their logits, (n, draft_vocab); None: nothing."""
        if not any(session.draws for session, _ in rows):
            return None
        silence = np.zeros(self.layer.spec.draft_vocab, np.float32)
        kinds = list(dict.fromkeys(rows))  # rows of one level share theirs
        drawn = [session.noise(position) for session, position in kinds]
        place = {kind: number for number, kind in enumerate(kinds)}
        table = torch.from_numpy(np.stack([silence if noise is None else noise for noise in drawn]))
        return table.to(self.layer.device)[self._index(np.array([place[row] for row in rows]))]

    def _unseen(self, work: list[tuple[LiveSession, Plan]], widest: int) -> tuple[NDArray[np.bool_], int, int]:
        """What each row of the padded batch must not look at, among the columns in use; how many of either kind.

        Padding sees nothing, so its output is not a number; nobody reads it.
        """
        entries = max(session.tree.entries for session, _ in work)
        places = max(session.rows.used for session, _ in work)
        unseen = np.ones((len(work), widest, entries + places), np.bool_)
        for mask, (session, plan) in zip(unseen, work, strict=True):
            own = len(plan.tokens)
            mask[:own, :entries] = ~session.tree.seen(plan.entries, entries)[:, ::-1]
            mask[:own, entries : entries + session.rows.used] = ~session.rows.seen(plan.positions)
        return unseen, entries, places

    def _index(self, values: Ints) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.layer.device)


_ORDER = ("slots", "columns", "sources", "targets", "place", "positions", "tokens")


def _gather(work: list[tuple[LiveSession, Plan]], counts: list[int], widest: int) -> _Batch:
    """All rows of a pass; the last one is repeated up to a common size, which writes what it wrote once more."""

    def beside(parts: list[Ints]) -> Ints:
        values = np.concatenate(parts)
        return np.pad(values, (0, -len(values) % _ROUND if len(values) > 1 else 0), mode="edge")

    plans = [plan for _, plan in work]
    return _Batch(
        tokens=beside([plan.tokens for plan in plans]),
        positions=beside([plan.positions for plan in plans]),
        columns=beside([plan.columns for plan in plans]),
        sources=beside([plan.sources for plan in plans]),
        targets=beside([plan.targets for plan in plans]),
        slots=beside([np.full(own, session.slot) for (session, _), own in zip(work, counts, strict=True)]),
        place=beside([number * widest + np.arange(own) for number, own in enumerate(counts)]),
    )
