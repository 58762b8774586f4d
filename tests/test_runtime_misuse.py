"""What a runtime refuses, in which words, and what its end ends."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runtime_helpers import LIMITS, PROMPT, WARM, SlowTarget, all_of, alone, eventually, run
from tiny_session import ToyTarget, write_text_files

from starsd.edge import Drafting, Grammar, Limits, Piece, Runtime, Sampling
from starsd.edge.options import RuntimeOptions
from starsd.edge.text import Text
from starsd.shared.errors import ContextOverflowError, EngineError, UsageError

pytest_plugins = ("runtime_fixtures",)


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ([], {}, UsageError, "prompt is empty, expected at least one token"),
        ([5, "a"], {}, UsageError, "prompt holds 'str' object cannot be interpreted as an integer, expected token ids"),
        ([5, {"role": "user"}], {}, UsageError, "prompt mixes messages and token ids, expected one or the other"),
        ([7] * 50, {}, ContextOverflowError, "prompt has 50 tokens, expected at most 40: shorten it"),
        (None, {}, UsageError, "prompt is NoneType, expected a text, a list of messages or token ids"),
        (b"Why?", {}, UsageError, "prompt is bytes, expected a text, a list of messages or token ids"),
        ({"role": "user"}, {}, UsageError, "prompt is dict, expected a text, a list of messages or token ids"),
        ([5, 300], {}, UsageError, "prompt holds token 300, expected 0 to 299"),
        ([5, -1], {}, UsageError, "prompt holds token -1, expected 0 to 299"),
        (PROMPT, {"sampling": {"top_p": 1}}, UsageError, "sampling is dict, expected Sampling(…)"),
        (PROMPT, {"limits": 9}, UsageError, "limits is int, expected Limits(…)"),
        (PROMPT, {"sampling": Sampling(top_p=2)}, UsageError, "top_p is 2, expected more than 0 and at most 1"),
        (PROMPT, {"limits": Limits(stop=("",))}, UsageError, "stop string is empty, expected at least one character"),
        (PROMPT, {"top_logprobs": -1}, UsageError, "top_logprobs is -1, expected 0 or more"),
        (PROMPT, {"choice": -1}, UsageError, "choice is -1, expected 0 or more"),
    ],
)
def test_what_cannot_be_met_is_refused_and_holds_nothing(
    open_one: Callable[..., Runtime], prompt: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    runtime = open_one(ToyTarget(context=40), conversations=1)
    with pytest.raises(error) as refusal:
        runtime.generate(prompt, **options)
    assert str(refusal.value).startswith(message)
    assert runtime.status().busy == 0
    with pytest.raises(error):
        asyncio.run(all_of(runtime.agenerate(prompt, **options)))
    assert run(runtime, PROMPT).new_tokens == 24


def test_runtimes_need_a_conversation(open_one: Callable[..., Runtime]) -> None:
    with pytest.raises(UsageError, match=r"^conversations are 0, expected 1 or more$"):
        open_one(conversations=0)


def test_options_of_a_runtime_are_checked(open_one: Callable[..., Runtime]) -> None:
    with pytest.raises(UsageError, match=r"^got server 'ws://a:1' and 'ws://b:1' in drafting, expected one$"):
        open_one(server="ws://a:1", drafting=Drafting(server="ws://b:1"))
    with pytest.raises(UsageError, match=r"^engine is dict, expected Engine\(…\)$"):
        open_one(engine={})
    with pytest.raises(UsageError, match=r"^idle_seconds is 0, expected more than 0$"):
        Drafting(idle_seconds=0)
    with pytest.raises(TypeError, match=r"^Unexpected keyword argument 'temperature'$"):
        open_one().generate(PROMPT, temperature=1)  # type: ignore[call-arg]


def test_a_server_may_be_named_alone(open_one: Callable[..., Runtime]) -> None:
    runtime = open_one(server="ws://127.0.0.1:9", drafting=Drafting(codec="int4"))
    assert runtime.drafting == Drafting(server="ws://127.0.0.1:9", codec="int4")
    assert runtime.status().server == "ws://127.0.0.1:9"


def test_options_and_defaults_are_seen_where_they_are_given() -> None:
    for method in (Runtime.generate, Runtime.agenerate):
        assert str(inspect.signature(method)).startswith("(self, prompt: 'Prompt', *, sampling: 'Sampling' = Sampling(")
    opening = inspect.signature(Runtime.open).parameters
    assert list(opening) == ["model", *RuntimeOptions.__struct_fields__]
    assert opening["conversations"].default == RuntimeOptions().conversations
    assert inspect.signature(Runtime.around).parameters["text"].default is inspect.Parameter.empty


def test_threads_cannot_share_a_step(open_one: Callable[..., Runtime], text: Text) -> None:
    """But they may take turns."""
    reached, go_on = threading.Event(), threading.Event()

    class Gated(ToyTarget):
        def score(self, tokens: Any, parents: Any) -> Any:
            reached.set()
            assert go_on.wait(10)
            return super().score(tokens, parents)

    pieces = open_one(Gated()).generate(PROMPT, sampling=WARM, limits=LIMITS)
    taken: list[Piece] = []
    thread = threading.Thread(target=lambda: taken.append(next(pieces)))
    thread.start()
    assert reached.wait(10)
    with pytest.raises(EngineError, match=r"^generation is at a step already, expected one consumer at a time$"):
        next(pieces)
    go_on.set()
    thread.join()
    assert [token for piece in [*taken, *pieces] for token in piece.tokens] == alone(text, PROMPT)


def test_a_generator_may_be_closed_again_and_says_no_more(open_one: Callable[..., Runtime]) -> None:
    runtime = open_one(conversations=1)
    for begun in (True, False):
        pieces = runtime.generate(PROMPT, sampling=WARM)
        if begun:
            next(pieces)
        for _ in range(2):
            pieces.close()
            with pytest.raises(StopIteration):
                next(pieces)
        assert runtime.status().busy == 0


def test_two_runtimes_know_nothing_of_each_other(open_one: Callable[..., Runtime], tmp_path: Path) -> None:
    one, two = open_one(), Runtime.around(ToyTarget(), text=Text.open(write_text_files(tmp_path)))
    with two:
        pairs = zip(*(runtime.generate(PROMPT, sampling=WARM, limits=LIMITS) for runtime in (one, two)), strict=True)
        assert all(first.tokens == second.tokens for first, second in pairs)
        with pytest.raises(UsageError, match=r"^grammar is for another text, expected one made with this session's$"):
            two.generate(PROMPT, grammar=Grammar.json_object(one.text))
        one.close()
        assert run(two, PROMPT).new_tokens == 24


def test_closing_ends_everything(open_one: Callable[..., Runtime]) -> None:
    runtime = open_one(SlowTarget())
    ended = threading.Event()
    running = runtime.generate(PROMPT, sampling=WARM, limits=Limits(max_new_tokens=3000))
    idle = runtime.generate([5, 8], sampling=WARM)
    next(idle)
    thread = threading.Thread(target=lambda: (list(running), ended.set()))
    thread.start()
    eventually(lambda: runtime.status().busy == 2)
    runtime.close()
    assert ended.wait(5)
    assert list(idle) == []
    assert runtime.status().busy == 0
    with pytest.raises(UsageError, match=r"^runtime is closed, expected an open one$"):
        runtime.generate(PROMPT)
    with pytest.raises(UsageError, match=r"^runtime is closed, expected an open one$"):
        asyncio.run(all_of(runtime.agenerate(PROMPT)))
    with pytest.raises(UsageError, match=r"^runtime is closed, expected an open one$"):
        runtime.session()
    with pytest.raises(UsageError, match=r"^runtime is closed, expected an open one$"), runtime:
        pass
    runtime.close()


def test_importing_the_package_is_cheap_and_tells_what_there_is() -> None:
    code = "import sys, starsd.edge as e; print('numpy' in sys.modules, *dir(e)); e.Runtime; e.Nothing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith(
        "False Drafting Engine Grammar Limits Outcome Piece Runtime Sampling Status TokenLogprob"
    )
    assert "module 'starsd.edge' has no attribute 'Nothing'" in done.stderr
