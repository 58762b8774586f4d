"""Answers as OpenAI's clients read them: whole, or as the chunks of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from starsd.edge.api_answers import Event
from starsd.edge.api_tokens import ChatLogprobs, CompletionLogprobs
from starsd.edge.text import Text

Json = dict[str, Any]


@dataclass(frozen=True)
class Frame:
    """What every object of an answer says of it. The same fingerprint and seed give the same text."""

    model: str
    fingerprint: str
    seed: int
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def around(self, kind: str, prefix: str, choices: list[Json]) -> Json:
        return {
            "id": f"{prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            "starsd": {"seed": self.seed},
        }


class Shape(Protocol):
    def chunks(self, event: Event) -> list[Json]:
        """What a stream says of an event; often nothing."""
        ...

    def whole(self, events: Sequence[Event]) -> Json: ...

    def last(self) -> Json:
        """The chunk without choices, which carries the usage."""
        ...


class ChatShape:
    """/v1/chat/completions. `logprobs` says whether they were asked for."""

    def __init__(self, frame: Frame, text: Text, logprobs: bool) -> None:
        self._frame = frame
        self._logprobs = ChatLogprobs(text) if logprobs else None
        self._begun: set[int] = set()
        self._calls: dict[int, int] = {}

    def chunks(self, event: Event) -> list[Json]:
        said: list[Json] = []
        if event.index not in self._begun:
            self._begun.add(event.index)
            said.append(self._chunk(event.index, {"role": "assistant", "content": ""}))
        told = self._told(event)
        if event.text or (told is not None and told["content"]):
            said.append(self._chunk(event.index, {"content": event.text}, told, tints=event.tints))
        if event.call is not None:
            number = self._calls.get(event.index, 0)
            self._calls[event.index] = number + 1
            said.append(self._chunk(event.index, {"tool_calls": [event.call.shape(number)]}))
        if event.finish is not None:
            said.append(self._chunk(event.index, {}, finish=event.finish))
        return said

    def last(self) -> Json:
        return self._frame.around("chat.completion.chunk", "chatcmpl", [])

    def whole(self, events: Sequence[Event]) -> Json:
        return self._frame.around("chat.completion", "chatcmpl", [self._choice(own) for own in _by_answer(events)])

    def _choice(self, events: Sequence[Event]) -> Json:
        text = "".join(event.text for event in events)
        calls = [event.call.shape() for event in events if event.call is not None]
        message: Json = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        content = [entry for event in events if (told := self._told(event)) for entry in told["content"]]
        choice: Json = {"index": events[0].index, "message": message, "finish_reason": events[-1].finish}
        choice["logprobs"] = {"content": content, "refusal": None} if self._logprobs else None
        return choice | _tinted([tint for event in events for tint in event.tints or []])

    def _chunk(
        self,
        index: int,
        delta: Json,
        logprobs: Json | None = None,
        finish: str | None = None,
        tints: list[Json] | None = None,
    ) -> Json:
        choice: Json = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self._frame.around("chat.completion.chunk", "chatcmpl", [choice | _tinted(tints)])

    def _told(self, event: Event) -> Json | None:
        if self._logprobs is None or event.piece is None:
            return None
        return {"content": self._logprobs.shape(event.piece.logprobs), "refusal": None}


class CompletionShape:
    """/v1/completions."""

    def __init__(self, frame: Frame, text: Text, logprobs: bool) -> None:
        self._frame, self._text, self._logprobs = frame, text, logprobs
        self._told: dict[int, CompletionLogprobs] = {}

    def chunks(self, event: Event) -> list[Json]:
        logprobs = self._logprobs_of(event)
        if not (event.text or event.finish or (logprobs and logprobs["tokens"])):
            return []
        choice = self._choice(event.index, event.text, logprobs, event.finish)
        return [self._frame.around("text_completion", "cmpl", [choice | _tinted(event.tints)])]

    def last(self) -> Json:
        return self._frame.around("text_completion", "cmpl", [])

    def whole(self, events: Sequence[Event]) -> Json:
        choices = []
        for own in _by_answer(events):
            told: Json | None = {} if self._logprobs else None
            for event in own:
                for name, values in (self._logprobs_of(event) or {}).items():
                    assert told is not None
                    told.setdefault(name, []).extend(values)
            text = "".join(event.text for event in own)
            tints = [tint for event in own for tint in event.tints or []]
            choices.append(self._choice(own[0].index, text, told, own[-1].finish) | _tinted(tints))
        return self._frame.around("text_completion", "cmpl", choices)

    def _choice(self, index: int, text: str, logprobs: Json | None, finish: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs_of(self, event: Event) -> Json | None:
        if not self._logprobs or event.piece is None:
            return None
        told = self._told.setdefault(event.index, CompletionLogprobs(self._text))
        return told.shape(event.piece.logprobs)


def _by_answer(events: Sequence[Event]) -> list[list[Event]]:
    own: dict[int, list[Event]] = {}
    for event in events:
        own.setdefault(event.index, []).append(event)
    return list(own.values())


def _tinted(tints: Sequence[Json] | None) -> Json:
    return {"starsd": {"tokens": list(tints)}} if tints else {}
