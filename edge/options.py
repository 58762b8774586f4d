"""What a runtime, and what an answer, may be told: each option with its default, once.

`takes` lets a method that gets such options as one struct be called with keyword arguments, type-checked:

    @takes(AnswerOptions)
    def generate(self, prompt, options): …      # called as generate("Why?", sampling=…, private=True)
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import msgspec

from starsd.edge.drafting import Drafting
from starsd.edge.telemetry import Telemetry
from starsd.shared.config import CONVERSATIONS, Engine, Limits, Sampling
from starsd.shared.errors import UsageError
from starsd.shared.profiles import Profile

if TYPE_CHECKING:
    from starsd.edge.grammar import Grammar
    from starsd.edge.text import Text

P = ParamSpec("P")
Owner = TypeVar("Owner")
Subject = TypeVar("Subject")
Options = TypeVar("Options", bound="msgspec.Struct")
Result = TypeVar("Result")


class RuntimeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a runtime is set up."""

    precision: str | None = None  # of the bundle; None: the default one
    server: str = ""  # the drafting server's address, short for drafting=Drafting(server=…)
    drafting: Drafting = Drafting()  # all about drafts
    engine: Engine = Engine()
    profile: Profile | None = None  # passes take this device's time, features its bytes
    conversations: int = CONVERSATIONS  # caches kept; of more conversations the one idle for longest loses its own
    telemetry: Callable[[], Telemetry] = Telemetry  # knows nothing; ProcessTelemetry reads this device's sensors

    def __post_init__(self) -> None:
        _check(self, drafting=Drafting, engine=Engine)
        if self.server:
            if self.drafting.server not in ("", self.server):
                raise UsageError(f"got server {self.server!r} and {self.drafting.server!r} in drafting, expected one")
            drafting = msgspec.structs.replace(self.drafting, server=self.server)
            msgspec.structs.force_setattr(self, "drafting", drafting)


class AroundOptions(RuntimeOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The same around an engine that is there already; `precision` is what it is called."""

    text: Text  # the same model's
    name: str = "model"
    fingerprint: str = ""  # by which a server knows the model


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a prompt is answered."""

    sampling: Sampling = Sampling()  # greedy
    limits: Limits = Limits()
    choice: int = 0  # numbers the answers to one prompt, each with noise of its own
    grammar: Grammar | None = None  # what the answer may be; made with the runtime's `text`
    top_logprobs: int | None = None  # pieces say how likely their tokens were, and that many of the likeliest
    private: bool = False  # nothing of the conversation is sent to the server

    def __post_init__(self) -> None:
        _check(self, sampling=Sampling, limits=Limits)


def takes(
    options: Callable[P, Options],
) -> Callable[[Callable[[Owner, Subject, Options], Result]], Callable[Concatenate[Owner, Subject, P], Result]]:
    """Let a method be called with the fields of its last parameter, a struct, as keyword arguments."""

    def taking(
        method: Callable[[Owner, Subject, Options], Result],
    ) -> Callable[Concatenate[Owner, Subject, P], Result]:
        @functools.wraps(method)
        def called(owner: Owner, subject: Subject, /, *args: P.args, **named: P.kwargs) -> Result:
            return method(owner, subject, options(*args, **named))

        own = list(inspect.signature(method).parameters.values())[:-1]
        called.__signature__ = inspect.Signature([*own, *_keywords(options)])  # type: ignore[attr-defined]
        return called

    return taking


def _keywords(options: Any) -> list[inspect.Parameter]:
    """A struct's fields, for help() and editors. What msgspec has for it would import whatever the types name."""
    bases = reversed(options.__mro__)
    types = {name: kind for base in bases for name, kind in vars(base).get("__annotations__", {}).items()}
    names, defaults = options.__struct_fields__, options.__struct_defaults__
    values = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    required = inspect.Parameter.empty
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=required if values.get(name, msgspec.NODEFAULT) is msgspec.NODEFAULT else values[name],
            annotation=types[name],
        )
        for name in names
    ]


def _check(options: Any, **kinds: type) -> None:
    """Raise UsageError for an option that is none of its kind, such as a dict."""
    for name, kind in kinds.items():
        if not isinstance(got := getattr(options, name), kind):
            raise UsageError(f"{name} is {type(got).__name__}, expected {kind.__name__}(…)")
