"""`starsd-edge`: what people type on the device."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from starsd.edge import image_cli
from starsd.edge.api_settings import Settings, read_keys
from starsd.edge.policy import Policy
from starsd.shared import console
from starsd.shared.config import (
    DEFAULT_CODEC,
    DEFAULT_MODEL,
    DEFAULT_PRECISION,
    OVERFLOWS,
    PRECISIONS,
    PROVIDERS,
    Engine,
    Limits,
    Sampling,
)
from starsd.shared.errors import UsageError
from starsd.shared.features import CODECS

if TYPE_CHECKING:
    from starsd.edge.runtime import Drafting, Runtime
    from starsd.edge.telemetry import Telemetry

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
POLICIES = tuple(policy.value for policy in Policy)
CHOICE, LIMITS, ENGINE, API = Sampling(), Limits(), Engine(), Settings()
CHAT_LIMITS = Limits(max_new_tokens=1024, overflow="truncate")

Model = Annotated[str, typer.Option(help="smollm2-135m, hf:org/name, a folder or a GGUF, or a bundle's or its name.")]
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
Provider = Annotated[str, typer.Option(help=f"Where ONNX Runtime computes: {', '.join(PROVIDERS)}.")]
MaxContext = Annotated[int, typer.Option(help="Tokens of context; 0: as many as the model was trained for.")]
Server = Annotated[str, typer.Option(help="Drafter to ask, ws://host:port or wss://host:port.")]
PolicyName = Annotated[str, typer.Option("--policy", help=f"Where drafts come from: {', '.join(POLICIES)}.")]
Codec = Annotated[str, typer.Option(help=f"Features on the wire: {', '.join(CODECS)}.")]
ShareNoise = Annotated[bool, typer.Option(help="Tell the server temperature and seed, for better drafts.")]
TokenFile = Annotated[Path | None, typer.Option(help="File with this device's token, for wss://.")]
ReadSensors = Annotated[bool, typer.Option("--telemetry/--no-telemetry", help="Read this device's sensors.")]
Trust = Annotated[Path | None, typer.Option(help="Certificates to trust beside the system's, PEM.")]
ProfileName = Annotated[str, typer.Option("--profile", help="Take a device's time: a profile's name or file.")]
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
    server: Server = "",
    policy: PolicyName = Policy.NEVER_WAIT.value,
    profile: ProfileName = "",
    codec: Codec = DEFAULT_CODEC,
    share_noise: ShareNoise = True,
    token_file: TokenFile = None,
    trust: Trust = None,
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
    provider: Provider = ENGINE.provider,
    telemetry: ReadSensors = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object an answer.")] = False,
) -> None:
    """Answer prompts, each with the model's chat template and its own default system message."""
    from starsd.edge.generate import answer_all
    from starsd.shared.prompts import Prompt, read_prompts

    drafting = _drafting(policy, server, codec, token_file, trust, share_noise)
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
    engine = Engine(threads=threads, max_context=max_context, provider=provider)
    with _open(model, precision, engine, drafting, telemetry and not profile, profile) as runtime:
        answer_all(runtime.session(), asked, sampling, limits, progress=console.StderrProgress(), as_json=as_json)
        if runtime.link is not None and (notice := runtime.link.channel.notice):
            print(f"starsd-edge: {notice}", file=sys.stderr)


@app.command()
def chat(
    *,
    model: Model = DEFAULT_MODEL,
    precision: Precision = None,
    server: Server = "",
    policy: PolicyName = Policy.NEVER_WAIT.value,
    codec: Codec = DEFAULT_CODEC,
    share_noise: ShareNoise = True,
    token_file: TokenFile = None,
    trust: Trust = None,
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
    provider: Provider = ENGINE.provider,
    telemetry: ReadSensors = True,
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
    drafting = _drafting(policy, server, codec, token_file, trust, share_noise)
    engine = Engine(threads=threads, max_context=max_context, provider=provider)
    with _open(model, precision, engine, drafting, telemetry) as runtime:
        ChatTerminal(runtime.session(), sampling, limits, system=system, link=runtime.link).run()


@app.command()
def run(
    *,
    model: Model = DEFAULT_MODEL,
    precision: Precision = None,
    host: Annotated[str, typer.Option(help="Address to listen on; others than this machine's need a key.")] = API.host,
    port: Annotated[int, typer.Option(help="0: any that is free.")] = API.port,
    server: Server = "",
    policy: PolicyName = Policy.NEVER_WAIT.value,
    codec: Codec = DEFAULT_CODEC,
    share_noise: ShareNoise = True,
    token_file: TokenFile = None,
    trust: Trust = None,
    conversations: Annotated[int, typer.Option(help="Answers under way at a time.")] = API.conversations,
    queue: Annotated[int, typer.Option(help="Requests that may wait; the next one is told to come later.")] = API.queue,
    api_key_file: Annotated[Path | None, typer.Option(help="Keys, one a line; $STARSD_API_KEY is one too.")] = None,
    allow_origin: Annotated[list[str] | None, typer.Option(help="Site whose pages may ask; repeatable.")] = None,
    grace: Annotated[float, typer.Option(help="Seconds that answers under way get at the end.")] = API.grace,
    max_context: MaxContext = ENGINE.max_context,
    threads: Threads = ENGINE.threads,
    provider: Provider = ENGINE.provider,
    telemetry: ReadSensors = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, when ready.")] = False,
) -> None:
    """Serve OpenAI's API and the chat page on this device, until SIGTERM or Ctrl-C."""
    from starsd.edge.run import run as serve

    settings = msgspec.structs.replace(
        API,
        host=host,
        port=port,
        conversations=conversations,
        queue=queue,
        keys=read_keys(api_key_file),
        origins=tuple(allow_origin or ()),
        grace=grace,
    )
    drafting = _drafting(policy, server, codec, token_file, trust, share_noise)
    engine = Engine(threads=threads, max_context=max_context, provider=provider)
    sensors = _sensors(telemetry)
    serve(model, precision, engine=engine, drafting=drafting, settings=settings, telemetry=sensors, as_json=as_json)


def _drafting(
    policy: str, server: str, codec: str, token_file: Path | None, trust: Path | None, share_noise: bool
) -> Drafting:
    from starsd.edge.runtime import Drafting

    if policy not in POLICIES:
        raise UsageError(f"policy is {policy!r}, expected {' or '.join(POLICIES)}")
    try:
        token = token_file.read_text().strip() if token_file is not None else os.environ.get("STARSD_TOKEN", "")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"token file {token_file} cannot be read: {error}") from error
    return Drafting(
        policy=Policy(policy), server=server, token=token, trust=trust, codec=codec, share_noise=share_noise
    )


def _open(
    model: str, precision: str | None, engine: Engine, drafting: Drafting, telemetry: bool, profile: str = ""
) -> Runtime:
    from starsd.edge.runtime import Runtime
    from starsd.shared.profiles import read_profile

    paced = read_profile(profile) if profile else None
    sensors = _sensors(telemetry)
    return Runtime.open(model, precision=precision, engine=engine, drafting=drafting, profile=paced, telemetry=sensors)


def _sensors(read: bool) -> Callable[[], Telemetry]:
    from starsd.edge.telemetry import Telemetry
    from starsd.edge.telemetry_process import ProcessTelemetry

    return ProcessTelemetry if read else Telemetry


def _logit_bias(text: str) -> dict[int, float]:
    try:
        return msgspec.json.decode(text, type=dict[int, float])
    except msgspec.DecodeError as error:
        raise UsageError(f'logit bias {text!r} cannot be read, expected JSON such as {{"42": -5}}: {error}') from error


image_cli.register(app)


def main(argv: Sequence[str] | None = None) -> int:
    return console.run(app, argv, "starsd-edge", "edge")


if __name__ == "__main__":
    sys.exit(main())
