"""The conversations of a runtime: at most so many caches, each given to who can use most of what it holds.

Of the idle ones a prompt gets the one that has read more than half of what it holds: its own last turn, mostly. Else it
gets a new one, and where there are as many as may be, the one that has been idle for longest. Before it reads anything
it copies what any other conversation has read of the prompt's beginning, such as the same instructions.

A conversation is *public* when a server may hear of it. A private one has no session at the server: there is nobody to
leak to. A public one reads anew what only private ones have read, since the server has never seen its features.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starsd.edge.generation import Generation
from starsd.edge.session import Session
from starsd.edge.speculator import Speculator
from starsd.edge.text import shared_length
from starsd.shared.errors import CapacityError, UsageError

ENDING_SECONDS = 10.0  # that an answer which was ended may take for its last step


@dataclass(eq=False)
class Conversation:
    """A session, and what the pool knows of it."""

    session: Session
    public: bool
    busy: bool = False
    answer: weakref.ref[Generation] | None = None  # weak, so that one that nobody takes pieces of ends
    used: int = 0  # rises with each use

    @property
    def running(self) -> Generation | None:
        return None if self.answer is None else self.answer()

    def shared(self, prompt: Sequence[int], public: bool) -> int:
        """Tokens that an answer to `prompt` need not read again."""
        return shared_length(self.session.cached, prompt[:-1]) if self.public or not public else 0


class Conversations:
    """Any thread may take one and give it back. `session` and `speculator` make new ones, public or
    private."""

    def __init__(self, most: int, session: Callable[[bool], Session], speculator: Callable[[bool], Speculator]) -> None:
        if most < 1:
            raise UsageError(f"conversations are {most}, expected 1 or more")
        self.most = most
        self._make, self._speculator = session, speculator
        self._all: list[Conversation] = []
        self._changed = threading.Condition()
        self._uses = itertools.count(1)
        self._closed = False

    @property
    def busy(self) -> int:
        return sum(conversation.busy for conversation in self._all)

    @property
    def answers_privately(self) -> bool:
        """Whether one of which no server may hear is being answered."""
        return any(conversation.busy and not conversation.public for conversation in list(self._all))

    def take(self, prompt: Sequence[int], public: bool) -> Conversation:
        """One for this prompt.

        Raises CapacityError when all are busy; waits a step for one whose answer is being ended.
        """
        end = time.monotonic() + ENDING_SECONDS
        with self._changed:
            while (found := self._choose(prompt, public)) is None:
                ending = any(one.running is not None and one.running.closing for one in self._all)
                if not ending or not self._changed.wait(end - time.monotonic()):
                    raise CapacityError(f"all {self.most} conversations are busy: try again when an answer has ended")
            if found.public != public:
                self._change(found, public)
            found.busy, found.used = True, next(self._uses)
            return found

    def began(self, conversation: Conversation, answer: Generation) -> None:
        """Its answer, without which it could not be ended; it is not kept alive."""
        with self._changed:
            conversation.answer = weakref.ref(answer)
            closed = self._closed
        if closed:
            answer.close()

    def most_read(self, public: bool, prompt: Sequence[int]) -> Session | None:
        """The session, busy or not, that has read most of a prompt, of those that such an answer may copy from."""
        with self._changed:
            shared = [(one.shared(prompt, public), one.session) for one in self._all]
        length, session = max(shared, key=lambda found: found[0], default=(0, None))
        return session if length else None

    def give_back(self, conversation: Conversation) -> None:
        with self._changed:
            conversation.busy, conversation.answer = False, None
            if self._closed:
                self._drop(conversation)
            self._changed.notify_all()

    def close(self, timeout: float = ENDING_SECONDS) -> None:
        """End all answers and forget all that was read; waits for the step that each is at."""
        with self._changed:
            self._closed = True
            running = [one.running for one in self._all]
        for answer in running:
            if answer is not None:
                answer.close()
        with self._changed:
            for idle in [one for one in self._all if not one.busy]:
                self._drop(idle)
            self._changed.wait_for(lambda: not self._all, timeout)

    def _choose(self, prompt: Sequence[int], public: bool) -> Conversation | None:
        """An idle one or a new one; None when there is neither."""
        if self._closed:
            raise UsageError("runtime is closed, expected an open one")
        idle = [one for one in self._all if not one.busy]
        fitting = [one for one in idle if 2 * one.shared(prompt, public) >= len(one.session.cached)]
        if fitting:
            return max(fitting, key=lambda one: (one.shared(prompt, public), one.used))
        if len(self._all) < self.most:
            self._all.append(Conversation(self._make(public), public))
            return self._all[-1]
        return min(idle, key=lambda one: one.used, default=None)

    def _change(self, conversation: Conversation, public: bool) -> None:
        """Let it have a session at the server, or none. A public one starts with nothing read."""
        conversation.session.renew(self._speculator(public), keep=not public)
        conversation.public = public

    def _drop(self, conversation: Conversation) -> None:
        conversation.session.close()
        self._all.remove(conversation)
