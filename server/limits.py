"""Every limit of a server, with its default. What reaches one is refused with a message that names it."""

from __future__ import annotations

import msgspec

from starsd.server.drafter import DynamicTree, SlotLimits
from starsd.shared.errors import UsageError
from starsd.shared.limits import MAX_MESSAGE

SCHEDULES = ("batched", "fifo")
_MOST = {"slots": 65_535, "window": 1 << 20, "nodes": 1024}  # what is allocated at the start, and what a Draft holds
PAPER_TREE = DynamicTree(total=60, depth=5, top_k=10)  # of `fifo`; arXiv 2601.21622


class ServerLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes, counts and seconds; a worker holds `slots` sessions of each head."""

    slots: int = 64
    window: int = 2048  # rows that the drafter looks back on
    entries: int = 256  # nodes of a tree that are expanded at a time
    rows_per_pass: int = 64  # over all sessions, features not counted
    quantum: int = 8  # rows that a session gets before it is the next one's turn
    nodes: int = 60  # of a near edge's tree, root included
    farthest: int = 4  # times as many nodes at most: once as many for each token that drafts come late
    depth: int = 16  # levels that are expanded
    top_k: int = 10  # children of a node
    full_trees: int = 32  # sessions of a head beyond which trees get smaller
    least_nodes: int = 16  # what they do not get smaller than
    nodes_per_draft: int = 12  # nodes of a growing tree that wait for each other
    max_nodes: int = 480  # that may be under way to an edge
    sessions: int = 64  # of a connection
    connections: int = 256
    max_message: int = MAX_MESSAGE  # bytes of a message to the server
    unread: int = 1_048_576  # bytes of a connection that wait for the drafter before its socket is no longer read
    unsent: int = 1_048_576  # bytes that wait for a peer before it is cut
    keepalive: float = 10.0  # seconds between pings, and until a peer that answers none is cut
    hello_seconds: float = 10.0  # until a connection has to have said Hello
    retry_seconds: float = 1.0  # after which one who found no room may try again
    stats_seconds: float = 1.0
    drain_seconds: float = 2.0  # for peers to close, once the server goes away

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} is {getattr(self, name)}, expected more than 0")
        for name, most in _MOST.items():
            if getattr(self, name) > most:
                raise UsageError(f"{name} is {getattr(self, name)}, expected at most {most:,}")
        if self.max_nodes < max(self.nodes, PAPER_TREE.total):
            raise UsageError(f"max_nodes is {self.max_nodes}, expected at least a whole tree of {self.nodes}")
        if self.unread < self.max_message:
            raise UsageError(f"unread is {self.unread}, expected at least a message of {self.max_message}")
        self.tree  # noqa: B018  # refuses what does not fit together

    @property
    def tree(self) -> DynamicTree:
        return DynamicTree(self.nodes, self.depth, self.top_k)

    @property
    def slot_limits(self) -> SlotLimits:
        return SlotLimits(self.slots, self.window, self.entries)


LIMITS = ServerLimits()
