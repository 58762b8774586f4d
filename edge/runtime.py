"""A device's model, ready to answer: engine, text, conversations, and the drafts that it may ask a server for.

    with Runtime.open("smollm2-135m") as runtime:
        for piece in runtime.generate("Why is the sky blue?"):
            print(piece.text, end="", flush=True)

An engine runs one pass at a time, whoever asks for it; conversations that share it have a cache each, and take turns.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import takewhile
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from threadpoolctl import threadpool_limits

from starsd.edge.answer import Piece
from starsd.edge.bundle import ensure_bundle
from starsd.edge.channel import Model
from starsd.edge.conversations import Conversations
from starsd.edge.drafting import Drafting, open_link
from starsd.edge.generation import Generation
from starsd.edge.paced_target import PacedTarget
from starsd.edge.phrasebooks import find_phrases
from starsd.edge.policy import Policy
from starsd.edge.regime import Step, Watch
from starsd.edge.session import Session, fit
from starsd.edge.speculator import Counts, Speculator
from starsd.edge.status import Status, of_link
from starsd.edge.target import Target, open_target
from starsd.edge.text import Text
from starsd.edge.turns import Turns
from starsd.shared import manifest
from starsd.shared.clock import REAL
from starsd.shared.config import Engine, Limits, Sampling
from starsd.shared.errors import UsageError
from starsd.shared.phrases import Phrasebook
from starsd.shared.profiles import Profile
from starsd.shared.sampling import check

if TYPE_CHECKING:
    from starsd.edge.grammar import Grammar

__all__ = ["Drafting", "Runtime", "Status"]

CONVERSATIONS = 8  # caches of K/V that a runtime keeps
Result = TypeVar("Result")
Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]


class Runtime:
    """Use as a context manager; closing it ends answers, the link, and drafts with it. Threads may share it."""

    _phrases: Phrasebook | None = None

    def __init__(
        self,
        model: str,
        precision: str | None = None,
        *,
        engine: Engine | None = None,
        drafting: Drafting | None = None,
        profile: Profile | None = None,
        conversations: int = CONVERSATIONS,
    ) -> None:
        """Pulls and exports what is missing. With a profile passes take a device's time, and features its bytes.

        Of more than `conversations` the one that has been idle for longest loses its cache. Raises StarsdError, of the
        kind that fits: see `starsd.shared.errors`.
        """
        bundle = ensure_bundle(model, precision)
        about = manifest.read(bundle)
        target = open_target("onnx", bundle, engine or Engine())
        known = Model(about.fingerprint, about.shape, about.features)
        self._begin(target, Text.open(bundle), known, (model, about.precision), drafting, profile, conversations)
        if self.drafting.phrases:
            self._phrases = find_phrases(about.name, about.shape.vocab, bundle)

        # a product of a few rows is over before a second thread has woken, and the engine wants the cores
        threadpool_limits(limits=1, user_api="blas")

    @classmethod
    def open(
        cls,
        model: str,
        precision: str | None = None,
        *,
        engine: Engine | None = None,
        drafting: Drafting | None = None,
        profile: Profile | None = None,
        conversations: int = CONVERSATIONS,
    ) -> Runtime:
        """The same as `Runtime(…)`: `model` is a known name, `hf:org/name`, a model's folder or a bundle's."""
        return cls(model, precision, engine=engine, drafting=drafting, profile=profile, conversations=conversations)

    @classmethod
    def around(
        cls,
        target: Target,
        text: Text,
        *,
        name: str = "model",
        precision: str = "fp32",
        fingerprint: str = "",
        drafting: Drafting | None = None,
        profile: Profile | None = None,
        conversations: int = CONVERSATIONS,
    ) -> Runtime:
        """On an engine and a text that are there already; a server knows the model by its fingerprint."""
        self = cls.__new__(cls)
        known = Model(fingerprint, target.shape, target.features)
        self._begin(target, text, known, (name, precision), drafting, profile, conversations)
        return self

    def _begin(
        self,
        target: Target,
        text: Text,
        model: Model,
        name: tuple[str, str],
        drafting: Drafting | None,
        profile: Profile | None,
        conversations: int,
    ) -> None:
        self.drafting = drafting or Drafting()
        self.text, self.model, self.profile = text, model, profile
        self.context = target.context
        self._name, self._precision = name
        self._target: Target | None = target
        self._first = target
        self._turns = Turns()
        self._watch = Watch()
        self._conversations = Conversations(conversations, self._session, self._speculator)
        self._workers = ThreadPoolExecutor(conversations, "conversation")
        self.link = None
        if self.drafting.server and self.drafting.policy is not Policy.PLAIN:
            self.link = open_link(self.drafting, profile, self.model.shape.hidden)

    def generate(
        self,
        prompt: Prompt,
        *,
        sampling: Sampling = Sampling(),  # noqa: B008  frozen
        limits: Limits = Limits(),  # noqa: B008
        choice: int = 0,
        grammar: Grammar | None = None,
        top_logprobs: int | None = None,
        private: bool = False,
    ) -> Generation:
        """Answer `prompt`: a user's turn, the messages of a conversation, or token ids. The last piece has the outcome.

        The answer is that of `starsd-edge generate`, token for token, whatever drafts come and whoever else is
        answered. May be called from many threads; each takes the pieces of its own. `choice` numbers the answers to one
        prompt. A `grammar` made with this runtime's `text` says what an answer may be. With `top_logprobs` pieces say
        how likely their tokens were, and that many of the likeliest. Of a `private` conversation nothing is sent to the
        server.

        What this conversation or another has read of the prompt's beginning is not read again. Close the generator to
        end an answer early, from any thread: it ends with the step it is at. Raises UsageError for what cannot be met,
        ContextOverflowError for a prompt that is too long, and CapacityError when all conversations are busy.
        """
        check(sampling)
        ids, keep = self._encode(prompt, limits)
        ids = fit(ids, limits, self.context, keep)
        told = self.link is not None and not private
        conversation = self._conversations.take(ids, told)
        done = partial(self._conversations.give_back, conversation)
        try:
            pieces = conversation.session.generate(
                ids,
                sampling,
                limits,
                choice=choice,
                keep=keep,
                grammar=grammar,
                top_logprobs=top_logprobs,
                like=partial(self._conversations.most_read, told),
            )
            generation = Generation(self._watched(conversation.session, pieces), done)
        except BaseException:
            done()
            raise
        self._conversations.began(conversation, generation)
        return generation

    async def agenerate(
        self,
        prompt: Prompt,
        *,
        sampling: Sampling = Sampling(),  # noqa: B008  frozen
        limits: Limits = Limits(),  # noqa: B008
        choice: int = 0,
        grammar: Grammar | None = None,
        top_logprobs: int | None = None,
        private: bool = False,
    ) -> AsyncGenerator[Piece, None]:
        """`generate` for asyncio, its steps in threads. Once cancelled or closed it ends with the step it is at."""
        opening = self._submit(
            partial(
                self.generate,
                prompt,
                sampling=sampling,
                limits=limits,
                choice=choice,
                grammar=grammar,
                top_logprobs=top_logprobs,
                private=private,
            )
        )
        try:
            pieces = await asyncio.wrap_future(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_discard)
            raise
        try:
            while not pieces.closing:
                piece = await asyncio.wrap_future(self._submit(partial(next, pieces, None)))
                if piece is None:
                    return
                yield piece
        finally:
            pieces.close()

    def session(self) -> Session:
        """A conversation of its own, beside those of `generate`, with which it takes turns."""
        return self._session(self.link is not None)

    def status(self) -> Status:
        """Costs next to nothing."""
        return Status(
            model=self._name,
            precision=self._precision,
            context=self.context,
            conversations=self._conversations.most,
            busy=self._conversations.busy,
            server=self.drafting.server,
            **of_link(self.link, self.drafting.policy, self._watch),
        )

    def close(self) -> None:
        """End all answers, each with the step it is at; free what was read, and say the server goodbye."""
        self._conversations.close()
        self._workers.shutdown(wait=False)
        if self.link is not None:
            self.link.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Run it in a thread of ours."""
        try:
            return self._workers.submit(call)
        except RuntimeError as error:  # the executor was shut down
            raise UsageError("runtime is closed, expected an open one") from error

    def _encode(self, prompt: Prompt, limits: Limits) -> tuple[list[int], int]:
        """Ids, and how many of the first stay when the oldest have to go."""
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        messages = [item for item in prompt if isinstance(item, Mapping)]
        ids = [item for item in prompt if not isinstance(item, Mapping)]
        if messages and ids:
            raise UsageError("prompt mixes messages and token ids, expected one or the other")
        if ids or not messages:
            try:
                return [operator.index(token) for token in ids], 0
            except TypeError as error:
                raise UsageError(f"prompt holds {error}, expected token ids, messages or one text") from error
        system = list(takewhile(lambda message: message.get("role") == "system", messages))
        keep = self.text.leading_tokens(system) if limits.overflow == "truncate" else 0
        return self.text.encode_chat(messages), keep

    def _session(self, told: bool) -> Session:
        target, self._target = self._target or self._first.sibling(), None
        paced = target if self.profile is None else PacedTarget(target, self.profile)
        return Session(paced, self.text, self._speculator(told), self._turns)

    def _speculator(self, told: bool) -> Speculator:
        policy = self.drafting.policy
        if self.link is not None and told:
            remote, share = self.link.channel.session(self.model), self.drafting.share_noise
            return Speculator(policy, remote, phrases=self._phrases, share_noise=share)
        alone = policy if policy is Policy.PLAIN else Policy.NEVER_WAIT
        return Speculator(alone, phrases=self._phrases)

    def _watched(self, session: Session, pieces: Generator[Piece, None, None]) -> Generator[Piece, None, None]:
        """The same pieces; what their steps were like is remembered for a while."""
        seen, began = Counts(), REAL.now()
        try:
            for piece in pieces:
                counts, remote, now = session.speculator.counts, session.speculator.remote, REAL.now()
                if piece.tokens:
                    waited, live = counts.waited - seen.waited, remote is None or remote.live
                    self._watch.saw(Step(now, now - began, waited, counts.remote - seen.remote, live))
                    seen = replace(counts)
                yield piece
                began = REAL.now()
        finally:
            pieces.close()


def _discard(opening: Future[Generation]) -> None:
    """Of an answer that nobody waits for any more."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
