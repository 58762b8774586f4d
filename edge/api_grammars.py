"""The grammars that requests ask for. Strangers write them, so each is tried in a process of its own before it is used;
apps send the same ones again and again, so the newest are kept, and what was refused stays refused."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from starsd.edge import grammar_rules
from starsd.edge.api_errors import ApiError, full
from starsd.edge.grammar import Grammar
from starsd.edge.grammar_trial import PATIENCE, Trial
from starsd.edge.text import Text
from starsd.shared.errors import CapacityError, UsageError

KEPT = 16  # grammars, of some megabytes at most
WAITING = 8  # requests whose grammar is being tried, or waits to be


@dataclass(frozen=True)
class Form:
    """What an answer, or a call in one, has to look like; `param` is the request's field that says so."""

    schema: dict[str, Any]
    param: str


ANY_OBJECT = Form({"type": "object"}, "response_format")


class Grammars:
    """Of one model. Belongs to one event loop, which goes on while they are compiled, as other requests do."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._trial = Trial(text)
        self._one = asyncio.Lock()
        self._waiting = 0
        self._found: OrderedDict[str, Grammar | str] = OrderedDict()  # by its rules; a text says why there is none

    async def of(self, form: Form) -> Grammar:
        """Raises ApiError for a schema that cannot be enforced or takes too much to compile, and (429) where too many
        wait for theirs; CapacityError where the device is too busy to compile it."""
        try:
            rules = grammar_rules.json_rules(form.schema)
        except UsageError as error:
            raise ApiError(str(error), param=form.param) from error
        if (known := self._known(rules)) is None:
            known = await self._compiled(rules)
        if isinstance(known, str):
            raise ApiError(known, param=form.param)
        return known

    async def _compiled(self, rules: str) -> Grammar | str:
        if self._waiting >= WAITING:
            raise full(PATIENCE, f"{WAITING} grammars wait to be compiled, expected fewer: try again later")
        self._waiting += 1
        try:
            async with self._one:  # whoever asked for the same waited for it
                if (known := self._known(rules)) is None:
                    try:
                        known = self._found[rules] = await asyncio.to_thread(self._made, rules)
                    except asyncio.CancelledError:  # the client left, or the server ends
                        self._trial.stop()
                        raise
                    if len(self._found) > KEPT:
                        self._found.popitem(last=False)
                return known
        finally:
            self._waiting -= 1

    def _known(self, rules: str) -> Grammar | str | None:
        if (known := self._found.get(rules)) is not None:
            self._found.move_to_end(rules)
        return known

    def _made(self, rules: str) -> Grammar | str:
        what = "JSON schema"
        try:
            self._trial.check(rules, what)
            return Grammar(self._text, rules, what)
        except CapacityError:  # which may be otherwise the next time
            raise
        except UsageError as error:
            return str(error)
