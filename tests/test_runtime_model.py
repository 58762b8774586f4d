"""The runtime on the real model: answers at the same time, constrained or not, are those of `starsd-edge generate`."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from starsd.edge import Drafting, Engine, Grammar, Limits, Outcome, Runtime, Sampling
from starsd.edge.policy import Policy

pytestmark = pytest.mark.model

QUESTIONS = ("Why do leaves turn red in autumn?", "Write a function that finds the largest of three numbers.")
GREEDY, WARM = Sampling(), Sampling(temperature=0.8, top_p=0.95, seed=3)
LIMITS = Limits(max_new_tokens=40)
CARD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["tree", "flower", "grass"]},
        "leaves": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["name", "kind", "leaves"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def bundle(smollm2_bundle: Callable[[str], Path]) -> str:
    return str(smollm2_bundle("int8"))


@pytest.fixture(scope="module")
def runtime(bundle: str) -> Iterator[Runtime]:
    with Runtime.open(bundle, engine=Engine(threads=1), conversations=3) as opened:
        yield opened


def run(runtime: Runtime, prompt: str, sampling: Sampling, limits: Limits = LIMITS, **options: Any) -> Outcome:
    *_, last = runtime.generate(prompt, sampling=sampling, limits=limits, **options)
    assert last.outcome is not None
    return last.outcome


def command(bundle: str, question: str, sampling: Sampling) -> list[int]:
    argv = [sys.executable, "-m", "starsd.edge.cli", "generate", "--model", bundle, "--prompt", question, "--json"]
    argv += ["--policy", "plain", "--threads", "1", "--max-new-tokens", "40", "--seed", str(sampling.seed)]
    argv += ["--temperature", str(sampling.temperature), "--top-p", str(sampling.top_p)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    ids: list[int] = json.loads(done.stdout)["token_ids"]
    return ids


def test_answers_at_the_same_time_are_those_of_the_command(runtime: Runtime, bundle: str) -> None:
    found: dict[tuple[str, float], list[int]] = {}

    def ask(question: str, sampling: Sampling) -> None:
        found[question, sampling.temperature] = run(runtime, question, sampling).token_ids

    asked = [(QUESTIONS[0], GREEDY), (QUESTIONS[0], WARM), (QUESTIONS[1], GREEDY)]
    threads = [threading.Thread(target=ask, args=one) for one in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for question, sampling in asked:
        assert found[question, sampling.temperature] == command(bundle, question, sampling)


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_constrained_answers_are_those_of_plain_decoding(runtime: Runtime, bundle: str, sampling: Sampling) -> None:
    limits = Limits(max_new_tokens=80)
    prompt = "Describe a plant as JSON with name, kind and leaves."
    drafted = run(runtime, prompt, sampling, limits, grammar=Grammar.json_schema(runtime.text, CARD))
    with Runtime.open(bundle, engine=Engine(threads=1), drafting=Drafting(policy=Policy.PLAIN)) as slow:
        plain = run(slow, prompt, sampling, limits, grammar=Grammar.json_schema(slow.text, CARD))
    assert (drafted.token_ids, drafted.finish_reason) == (plain.token_ids, "stop")
    card = json.loads(drafted.text)
    assert set(card) == {"name", "kind", "leaves"}
    assert drafted.passes < 0.8 * plain.passes
    assert drafted.near_ties == plain.near_ties


def test_a_copied_prompt_is_worth_one_that_was_read(runtime: Runtime) -> None:
    told = " ".join(f"Rule {n}: say it in few words." for n in range(60))
    messages = [{"role": "system", "content": told}, {"role": "user", "content": QUESTIONS[0]}]
    ids = runtime.text.encode_chat(messages)
    limits = Limits(max_new_tokens=16)
    running = [runtime.generate(ids, sampling=WARM, limits=limits, choice=choice) for choice in range(3)]
    answers = [[token for piece in pieces for token in piece.tokens] for pieces in running]
    session = runtime.session()
    for choice, answer in enumerate(answers):
        session.forget()
        assert [t for piece in session.generate(ids, WARM, limits, choice=choice) for t in piece.tokens] == answer
