"""What an answer may say: JSON, JSON of a schema, a regular expression, or a grammar; on the library llguidance.

A grammar becomes the set of tokens that may come next, a pure function of the tokens before (`Matcher.allowed`). The
sampler chooses among them, so drafts change nothing here either. What a grammar knows saves passes:

    drafts that it forbids are dropped before anybody verifies them
    where it leaves one token only, that token needs no pass of its own: it heads the next one
    where it leaves end tokens only, the answer is complete

JSON comes on one line, with one space behind each comma and colon: whitespace that may be of any length is where small
models get lost, and what is fixed costs no pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from starsd.edge import grammar_rules
from starsd.edge.grammar_rules import first_line
from starsd.edge.text import Text, shared_length
from starsd.shared.errors import GrammarError

_REMEMBERED = 128  # positions whose masks are kept, some kilobytes each
_TABLES: weakref.WeakKeyDictionary[Text, LLTokenizer] = weakref.WeakKeyDictionary()

Ids = NDArray[np.int64]


class Grammar:
    """Describes answers, for one tokenizer; may be used for any number of them, at a time and one after the other."""

    def __init__(self, text: Text, rules: str, what: str) -> None:
        """Use the functions below. Raises UsageError for what does not compile."""
        self.text = text
        self._root = grammar_rules.root(_table(text), rules, what)
        self._ends = text.eos or frozenset(_table(text).eos_tokens)

    @classmethod
    def json_object(cls, text: Text) -> Grammar:
        """Any JSON object."""
        return cls.json_schema(text, {"type": "object"})

    @classmethod
    def json_schema(cls, text: Text, schema: Mapping[str, Any]) -> Grammar:
        """JSON that a schema describes. Raises UsageError for one that is wrong or uses what cannot be enforced.

        A schema of a few words may take minutes to compile: one that strangers wrote belongs into a trial first.
        """
        return cls(text, grammar_rules.json_rules(schema), "JSON schema")

    @classmethod
    def regex(cls, text: Text, pattern: str) -> Grammar:
        """The whole answer matches `pattern`, in the syntax of Rust's regex: no look-around, no back-references."""
        return cls(text, grammar_rules.regex_rules(pattern), "regular expression")

    @classmethod
    def lark(cls, text: Text, grammar: str) -> Grammar:
        """A context-free grammar as llguidance writes it, a dialect of Lark's; its first rule is `start`."""
        return cls(text, grammar_rules.lark_rules(grammar), "grammar")

    def matcher(self) -> Matcher:
        """A place in it for one answer."""
        known = _table(self.text).vocab_size
        return Matcher(self._root.deep_copy(), self._ends, known, explicit=bool(self.text.eos))


class Matcher:
    """Answers for any path of generated ids; quick where it differs little from the one last asked about.

    Its state is the path and nothing else: another path first takes back what it does not share with it.
    """

    def __init__(self, matcher: LLMatcher, ends: frozenset[int], known: int, *, explicit: bool) -> None:
        """`ends` are the end tokens; `explicit`: the model has them, and may say them where the grammar may end. The
        tokenizer knows the first `known` ids."""
        self._matcher, self._ends, self._known, self._explicit = matcher, ends, known, explicit
        self._path: list[int] = []
        self._masks: dict[int, bytes] = {}  # by position on the path

    def allowed(self, path: Sequence[int]) -> Ids:
        """Ids that may follow `path`, rising, at least one; an end token only where the grammar may end.

        Raises UsageError where the grammar is too complex to go on.
        """
        self._follow(path)
        mask = self._masks.get(len(self._path))
        if mask is None:
            mask = self._matcher.compute_bitmask()
            self._must_work()
            self._masks[len(self._path)] = mask
            if len(self._masks) > _REMEMBERED:
                del self._masks[next(iter(self._masks))]
        ids = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
        if not self._explicit and len(others := ids[~np.isin(ids, list(self._ends))]):
            return others
        return ids

    def allows(self, path: Sequence[int]) -> bool:
        """Whether the whole of `path` may be said, at a fraction of what `allowed` costs.

        It may say yes where `allowed` says no: of several spellings of the same text that takes one only.
        """
        shared = self._rewind(path)
        rest = list(path[shared:])
        if any(not 0 <= token < self._known for token in rest):  # asked about one that it lacks, the library gives up
            return False
        return self._matcher.validate_tokens(rest) == len(rest)

    def forced(self, path: Sequence[int], most: int) -> list[int]:
        """What must follow `path` token by token, each being the only one that is allowed; up to `most`."""
        found: list[int] = []
        while len(found) < most:
            ids = self.allowed([*path, *found])
            if len(ids) > 1 or int(ids[0]) in self._ends:
                break
            found.append(int(ids[0]))
        return found

    def finished(self, path: Sequence[int]) -> bool:
        """Whether nothing may follow but an end token."""
        ids = self.allowed(path)
        return len(ids) <= len(self._ends) and self._ends.issuperset(ids.tolist())

    def _follow(self, path: Sequence[int]) -> None:
        rest = list(path[self._rewind(path) :])
        if rest:
            self._matcher.consume_tokens(rest)
            self._must_work()
            self._path += rest

    def _rewind(self, path: Sequence[int]) -> int:
        """Take back what `path` does not begin with; how many of its tokens are left."""
        old = len(self._path)
        shared = old if self._path == path[:old] else shared_length(self._path, path)
        if shared < old:
            self._matcher.rollback(old - shared)
            self._must_work()
            del self._path[shared:]
            self._masks = {at: mask for at, mask in self._masks.items() if at <= shared}
        return shared

    def _must_work(self) -> None:
        if self._matcher.is_error():
            said = first_line(self._matcher.get_error())
            raise GrammarError(
                f"grammar cannot be followed behind {len(self._path)} tokens, expected a simpler one: {said}"
            )


def _table(text: Text) -> LLTokenizer:
    """Of this text, made once."""
    if (found := _TABLES.get(text)) is None:
        found = _TABLES[text] = grammar_rules.token_table(text.tokenizer.to_str(), text.eos)
    return found
