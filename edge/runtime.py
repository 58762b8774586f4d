"""A device's model, ready to answer: engine, text, conversations, and the drafts that it may ask a server for.

    with Runtime.open("smollm2-135m") as runtime:
        for piece in runtime.generate("Why is the sky blue?"):
            print(piece.text, end="", flush=True)

An engine runs one pass at a time, whoever asks for it; conversations that share it have a cache each, and take turns.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import takewhile
from types import TracebackType
from typing import Any, TypeVar

from threadpoolctl import threadpool_limits

from starsd.edge.answer import Piece
from starsd.edge.async_generation import AsyncGeneration
from starsd.edge.bundle import ensure_bundle
from starsd.edge.channel import Model
from starsd.edge.conversations import Conversations
from starsd.edge.drafting import Drafting, open_link
from starsd.edge.generation import Generation
from starsd.edge.options import AnswerOptions, AroundOptions, RuntimeOptions, takes
from starsd.edge.paced_target import PacedTarget
from starsd.edge.phrasebooks import find_phrases
from starsd.edge.policy import Policy
from starsd.edge.regime import Step, Watch
from starsd.edge.session import Session, fit
from starsd.edge.speculator import Counts, Speculator
from starsd.edge.status import Status, of_link
from starsd.edge.target import Target, open_target
from starsd.edge.telemetry_memory import fitting
from starsd.edge.text import Text
from starsd.edge.turns import Turns
from starsd.shared import manifest
from starsd.shared.clock import REAL
from starsd.shared.config import Limits
from starsd.shared.errors import UsageError
from starsd.shared.phrases import Phrasebook
from starsd.shared.sampling import check
from starsd.shared.tensorrt_key import has_engine

__all__ = ["Drafting", "Runtime", "Status"]

CLOSED = "runtime is closed, expected an open one"
Result = TypeVar("Result")
Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]


class Runtime:
    """Use as a context manager; closing it ends answers, the link, and drafts with it. Threads may share it."""

    def __init__(
        self,
        target: Target,
        model: Model,
        options: AroundOptions,
        phrases: Phrasebook | None = None,
    ) -> None:
        """What `open` and `around` have in common; `phrases` are the model's."""
        self.text, self.model = options.text, model
        self.drafting, self.profile = options.drafting, options.profile
        self.telemetry = options.telemetry()
        self.context = target.context
        self._name, self._precision = options.name, options.precision or "fp32"
        self._target: Target | None = target
        self._first = target
        self._phrases = phrases
        self._turns = Turns()
        self._watch = Watch()
        self._closed = False
        self._conversations = Conversations(options.conversations, self._session, self._speculator)
        self._workers = ThreadPoolExecutor(options.conversations, "conversation")
        self.link = None
        if self.drafting.server and self.drafting.policy is not Policy.PLAIN:
            self.link = open_link(self.drafting, self.profile, model.shape.hidden, self._figures)

    @classmethod
    @takes(RuntimeOptions)
    def open(cls, model: str, options: RuntimeOptions) -> Runtime:
        """A known name, `hf:org/name`, a model's folder or GGUF, or a bundle; what is missing is pulled and exported.

        Raises StarsdError, of the kind that fits: see `starsd.shared.errors`.
        """
        bundle = ensure_bundle(model, options.precision)
        about = manifest.read(bundle)
        engine, reduced = fitting(about, options.engine, options.conversations)
        if reduced:
            print(f"starsd-edge: {reduced}", file=sys.stderr, flush=True)
        # an engine that was built here: falls back to the graph where it cannot be used, and says why
        built = has_engine(bundle) and engine.provider == "auto"
        target = open_target("tensorrt" if built else "onnx", bundle, engine)
        known = Model(about.fingerprint, about.shape, about.features)
        phrases = find_phrases(about.name, about.shape.vocab, bundle) if options.drafting.phrases else None
        said = {name: getattr(options, name) for name in options.__struct_fields__}
        said |= {"text": Text.open(bundle), "name": model, "precision": about.precision}
        runtime = cls(target, known, AroundOptions(**said), phrases)

        # a product of a few rows is over before a second thread has woken, and the engine wants the cores
        threadpool_limits(limits=1, user_api="blas")
        return runtime

    @classmethod
    @takes(AroundOptions)
    def around(cls, target: Target, options: AroundOptions) -> Runtime:
        """On an engine and a text that are there already."""
        return cls(target, Model(options.fingerprint, target.shape, target.features), options)

    @takes(AnswerOptions)
    def generate(self, prompt: Prompt, options: AnswerOptions) -> Generation:
        """Answer `prompt`: a user's turn, the messages of a conversation, or token ids. The last piece has the outcome.

        The answer is that of `starsd-edge generate`, token for token, whatever drafts come and whoever else is
        answered. May be called from many threads; each takes the pieces of its own. `options.AnswerOptions` says what
        may be asked for.

        What this conversation or another has read of the prompt's beginning is not read again. Close the generator to
        end an answer early, from any thread: it ends with the step it is at. Raises UsageError for what cannot be met,
        ContextOverflowError for a prompt that is too long, and CapacityError when all conversations are busy.
        """
        self._require_open()
        check(options.sampling)
        ids, keep = self._encode(prompt, options.limits)
        ids = fit(ids, options.limits, self.context, keep)
        public = self.link is not None and not options.private
        conversation = self._conversations.take(ids, public)
        done = partial(self._conversations.give_back, conversation)
        try:
            pieces = conversation.session.generate(
                ids,
                options.sampling,
                options.limits,
                choice=options.choice,
                keep=keep,
                grammar=options.grammar,
                top_logprobs=options.top_logprobs,
                like=partial(self._conversations.most_read, public),
            )
            generation = Generation(self._watched(conversation.session, pieces), done)
        except BaseException:
            done()
            raise
        self._conversations.began(conversation, generation)
        return generation

    @takes(AnswerOptions)
    def agenerate(self, prompt: Prompt, options: AnswerOptions) -> AsyncGeneration:
        """`generate` for asyncio, its steps in threads. What it raises comes with the first piece.

        Left by `break`, closed or dropped it ends at once; cancelled, with the step it is at.
        """
        begin = partial(self.generate, prompt, **{name: getattr(options, name) for name in options.__struct_fields__})
        return AsyncGeneration(begin, self._submit)

    def session(self) -> Session:
        """A conversation of its own, beside those of `generate`, with which it takes turns."""
        self._require_open()
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
            device=self.telemetry.reading(),
            tokens_per_joule=self.telemetry.tokens_per_joule,
            **of_link(self.link, self.drafting.policy, self._watch),
        )

    def close(self) -> None:
        """End all answers, each with the step it is at; free what was read, and say the server goodbye."""
        self._closed = True
        self._conversations.close()
        self._workers.shutdown(wait=False)
        if self.link is not None:
            self.link.close()
        self.telemetry.close()

    def __enter__(self) -> Runtime:
        self._require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Run it in a thread of ours."""
        self._require_open()
        try:
            return self._workers.submit(call)
        except RuntimeError as error:  # closed by another thread, just now
            raise UsageError(CLOSED) from error

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError(CLOSED)

    def _encode(self, prompt: Prompt, limits: Limits) -> tuple[list[int], int]:
        """Ids, and how many of the first stay when the oldest have to go."""
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, (bytes, bytearray, Mapping)) or not isinstance(prompt, Iterable):
            raise UsageError(f"prompt is {type(prompt).__name__}, expected a text, a list of messages or token ids")
        items: list[Any] = list(prompt)
        messages = [item for item in items if isinstance(item, Mapping)]
        ids = [item for item in items if not isinstance(item, Mapping)]
        if messages and ids:
            raise UsageError("prompt mixes messages and token ids, expected one or the other")
        if ids or not messages:
            try:
                ids = [operator.index(token) for token in ids]
            except TypeError as error:
                raise UsageError(f"prompt holds {error}, expected token ids, messages or one text") from error
            vocab = self.model.shape.vocab
            if (wrong := next((token for token in ids if not 0 <= token < vocab), None)) is not None:
                raise UsageError(f"prompt holds token {wrong}, expected 0 to {vocab - 1}")
            return ids, 0
        system = list(takewhile(lambda message: message.get("role") == "system", messages))
        keep = self.text.leading_tokens(system) if limits.overflow == "truncate" else 0
        return self.text.encode_chat(messages), keep

    def _session(self, public: bool) -> Session:
        target, self._target = self._target or self._first.sibling(), None
        paced = target if self.profile is None else PacedTarget(target, self.profile)
        return Session(paced, self.text, self._speculator(public), self._turns)

    def _speculator(self, public: bool) -> Speculator:
        policy, throttled = self.drafting.policy, self.telemetry.throttled
        if self.link is not None and public:
            remote, share = self.link.channel.session(self.model), self.drafting.share_noise
            return Speculator(policy, remote, phrases=self._phrases, share_noise=share, throttled=throttled)
        alone = policy if policy is Policy.PLAIN else Policy.NEVER_WAIT
        return Speculator(alone, phrases=self._phrases, throttled=throttled)

    def _figures(self) -> dict[str, float]:
        """Of the device, for the server: none while a private answer is made, which it would tell of."""
        return {} if self._conversations.answers_privately else self.telemetry.figures()

    def _watched(self, session: Session, pieces: Generator[Piece, None, None]) -> Generator[Piece, None, None]:
        """The same pieces; what their steps were like is remembered for a while."""
        seen, began, tokens = Counts(), REAL.now(), 0
        self.telemetry.begin()
        try:
            for piece in pieces:
                tokens += len(piece.tokens)
                counts, remote, now = session.speculator.counts, session.speculator.remote, REAL.now()
                if piece.tokens:
                    waited, live = counts.waited - seen.waited, remote is None or remote.live
                    self._watch.saw(Step(now, now - began, waited, counts.remote - seen.remote, live))
                    seen = replace(counts)
                yield piece
                began = REAL.now()
        finally:
            pieces.close()
            self.telemetry.end(tokens)
