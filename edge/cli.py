"""`starsd-edge`: what people type on the device."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from starsd.shared import console
from starsd.shared.config import DEFAULT_MODEL, DEFAULT_PRECISION, OVERFLOWS, PRECISIONS, Engine, Limits, Sampling
from starsd.shared.errors import UsageError

if TYPE_CHECKING:
    from starsd.edge.session import Session

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
POLICIES = ("plain",)
CHOICE, LIMITS, ENGINE = Sampling(), Limits(), Engine()
CHAT_LIMITS = Limits(max_new_tokens=1024, overflow="truncate")

Model = Annotated[str, typer.Option(help="smollm2-135m, hf:org/name, a model's folder or a bundle's.")]
Precision = Annotated[str | None, typer.Option(help=f"{', '.join(PRECISIONS)}; {DEFAULT_PRECISION} if not given.")]
Prompts = Annotated[Path | None, typer.Option(help='Lines {"id", "turns"} (the first counts) or {"id", "prompt"}.')]
MaxNewTokens = Annotated[int, typer.Option(help="Most tokens of an answer.")]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token, always.")]
TopP = Annotated[float, typer.Option(help="Sample from the most likely tokens with this share of probability.")]
TopK = Annotated[int, typer.Option(help="Sample from this many of the most likely tokens; 0: all.")]
MinP = Annotated[float, typer.Option(help="Least probability, as a share of the most likely token's.")]
Repetition = Annotated[float, typer.Option(help="Above 1: less of what prompt and answer already hold.")]
Presence = Annotated[float, typer.Option(help="Taken off the logit of every token in the answer.")]
Frequency = Annotated[float, typer.Option(help="The same for each time the token is in the answer.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same text.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends an answer and is not shown; repeatable.")]
Threads = Annotated[int, typer.Option(help="0: one for each physical core.")]
MaxContext = Annotated[int, typer.Option(help="Tokens of context; 0: as many as the model was trained for.")]
Overflow = Annotated[str, typer.Option(help=f"When a prompt leaves no room: {' or '.join(OVERFLOWS)}.")]


@app.callback()
def _edge() -> None:
    """The model, on this device."""


@app.command()
def generate(
    *,
    model: Model = DEFAULT_MODEL,
    precision: Precision = None,
    prompts: Prompts = None,
    prompt: Annotated[str | None, typer.Option(help="One prompt, given here.")] = None,
    policy: Annotated[str, typer.Option(help="Where drafts come from. Only plain so far: nowhere.")] = "plain",
    max_new_tokens: MaxNewTokens = LIMITS.max_new_tokens,
    temperature: Temperature = CHOICE.temperature,
    top_p: TopP = CHOICE.top_p,
    top_k: TopK = CHOICE.top_k,
    min_p: MinP = CHOICE.min_p,
    repetition_penalty: Repetition = CHOICE.repetition_penalty,
    presence_penalty: Presence = CHOICE.presence_penalty,
    frequency_penalty: Frequency = CHOICE.frequency_penalty,
    logit_bias: Annotated[str, typer.Option(help='JSON, token id to what its logit gains: {"42": -5}.')] = "{}",
    seed: Seed = CHOICE.seed,
    stop: Stop = None,
    overflow: Overflow = LIMITS.overflow,
    max_context: MaxContext = ENGINE.max_context,
    threads: Threads = ENGINE.threads,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object an answer.")] = False,
) -> None:
    """Answer prompts, each with the model's chat template and its own default system message."""
    from starsd.edge.generate import answer_all
    from starsd.shared.prompts import Prompt, read_prompts

    if policy not in POLICIES:
        raise UsageError(f"policy is {policy!r}, expected {' or '.join(POLICIES)}")
    if (prompts is None) == (prompt is None):
        got = "neither --prompts nor --prompt" if prompt is None else "both --prompts and --prompt"
        raise UsageError(f"got {got}, expected one of them")
    asked = read_prompts(prompts) if prompts is not None else [Prompt("prompt", (prompt or "",))]
    sampling = Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=_logit_bias(logit_bias),
        seed=seed,
    )
    limits = Limits(max_new_tokens=max_new_tokens, stop=tuple(stop or ()), overflow=overflow)
    session = _open_session(model, precision, Engine(threads=threads, max_context=max_context))
    answer_all(session, asked, sampling, limits, progress=console.StderrProgress(), as_json=as_json)


@app.command()
def chat(
    *,
    model: Model = DEFAULT_MODEL,
    precision: Precision = None,
    system: Annotated[str | None, typer.Option(help="Instructions, in place of the model's own.")] = None,
    max_new_tokens: MaxNewTokens = CHAT_LIMITS.max_new_tokens,
    temperature: Temperature = CHOICE.temperature,
    top_p: TopP = CHOICE.top_p,
    top_k: TopK = CHOICE.top_k,
    min_p: MinP = CHOICE.min_p,
    repetition_penalty: Repetition = CHOICE.repetition_penalty,
    seed: Seed = CHOICE.seed,
    stop: Stop = None,
    overflow: Overflow = CHAT_LIMITS.overflow,
    max_context: MaxContext = ENGINE.max_context,
    threads: Threads = ENGINE.threads,
) -> None:
    """Talk with the model."""
    from starsd.edge.chat_terminal import ChatTerminal

    sampling = Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    limits = Limits(max_new_tokens=max_new_tokens, stop=tuple(stop or ()), overflow=overflow)
    session = _open_session(model, precision, Engine(threads=threads, max_context=max_context))
    ChatTerminal(session, sampling, limits, system=system).run()


def _open_session(model: str, precision: str | None, engine: Engine) -> Session:
    from starsd.edge.bundle import ensure_bundle
    from starsd.edge.session import Session
    from starsd.edge.target import open_target
    from starsd.edge.text import Text

    bundle = ensure_bundle(model, precision)
    return Session(open_target("onnx", bundle, engine), Text.open(bundle))


def _logit_bias(text: str) -> dict[int, float]:
    try:
        return msgspec.json.decode(text, type=dict[int, float])
    except msgspec.DecodeError as error:
        raise UsageError(f'logit bias {text!r} cannot be read, expected JSON such as {{"42": -5}}: {error}') from error


def main(argv: Sequence[str] | None = None) -> int:
    return console.run(app, argv, "starsd-edge", "edge")


if __name__ == "__main__":
    sys.exit(main())
