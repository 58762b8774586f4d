"""`starsd-edge` as people type it: answers on stdout, everything else on stderr, one line when it fails."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from tiny_session import EOS, ToyTarget, outcome_of, write_text_files

from starsd.edge import link_news, runtime
from starsd.edge.answer import Outcome
from starsd.edge.chat_terminal import ChatTerminal
from starsd.edge.cli import main
from starsd.edge.session import Session
from starsd.edge.text import Text
from starsd.shared.config import Engine, Limits, Sampling
from starsd.shared.errors import ContextOverflowError, MissingExtraError
from starsd.shared.manifest import Manifest

KEYS = [
    *("id", "token_ids", "text", "finish_reason", "new_tokens", "passes", "accepted_remote", "accepted_ngram"),
    *("near_ties", "seconds", "prefill_seconds", "bytes_up", "bytes_down"),
]
MANIFEST = Manifest(
    name="toy",
    source="toy",
    fingerprint="f" * 64,
    architecture="toy",
    flavour="ort",
    precision="int8",
    shape=ToyTarget.shape,
    features=ToyTarget.features,
    eos=(EOS,),
    files={},
)
LONG = ["--max-new-tokens", "12", "--logit-bias", f'{{"{EOS}": -100}}']
SAMPLING, LIMITS = Sampling(logit_bias={EOS: -100}), Limits(max_new_tokens=12)


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The toy in the place of every bundle; gives what was asked for."""
    folder, asked = write_text_files(tmp_path / "bundle"), []

    def ensure(model: str, precision: str | None) -> Path:
        asked.append((model, precision))
        return folder

    def open_toy(kind: str, folder: Path, engine: Engine) -> ToyTarget:
        asked.append((kind, engine))
        return ToyTarget(engine.max_context or 4096)

    monkeypatch.setattr(runtime, "ensure_bundle", ensure)
    monkeypatch.setattr(runtime, "open_target", open_toy)
    monkeypatch.setattr(runtime.manifest, "read", lambda folder: MANIFEST)
    return asked


@pytest.fixture
def text(tmp_path: Path) -> Text:
    return Text.open(write_text_files(tmp_path / "bundle"))


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": "a", "turns": ["Is this so?", "unused"]}\n{"id": 2, "prompt": "你好"}\n', encoding="utf-8")
    return str(path)


def expected(text: Text, question: str, sampling: Sampling = SAMPLING, limits: Limits = LIMITS) -> Outcome:
    ids = text.encode_chat([{"role": "user", "content": question}])
    return outcome_of(Session(ToyTarget(), text), ids, sampling, limits)


def test_json_rows_have_the_contracts_keys_in_order(
    opened: list[Any], text: Text, prompts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--prompts", prompts, "--json", "--policy", "plain", *LONG]) == 0
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert [list(row) for row in rows] == [KEYS, KEYS]
    assert [row["id"] for row in rows] == ["a", 2]
    for row, question in zip(rows, ("Is this so?", "你好"), strict=True):
        outcome = expected(text, question)
        assert (row["token_ids"], row["text"]) == (outcome.token_ids, outcome.text)
        assert (row["new_tokens"], row["passes"], row["finish_reason"]) == (12, 11, "length")
    assert err == ""
    assert opened == [("smollm2-135m", None), ("onnx", Engine())]


def test_every_option_arrives(opened: list[Any], text: Text, prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.2}
    given |= {"presence_penalty": 0.3, "frequency_penalty": 0.2, "seed": 11}
    options = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    sampling = Sampling(**given, logit_bias={EOS: -100.0})  # type: ignore[arg-type]
    whole = expected(text, "Is this so?", sampling, Limits(max_new_tokens=40)).text
    stops = (whole[5:7], whole[9:12])
    argv = ["generate", "--prompts", prompts, "--json", "--max-new-tokens", "40", "--logit-bias", LONG[-1], *options]
    argv += ["--model", "m", "--precision", "int8", "--threads", "3", "--max-context", "999", "--policy", "plain"]
    assert main([*argv, "--stop", stops[0], "--stop", stops[1]]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[0])
    outcome = expected(text, "Is this so?", sampling, Limits(max_new_tokens=40, stop=stops))
    assert (row["token_ids"], row["text"], row["finish_reason"]) == (outcome.token_ids, outcome.text, "stop")
    assert opened == [("m", "int8"), ("onnx", Engine(threads=3, max_context=999))]
    for name in given:  # none of them is idle
        at = argv.index(f"--{name.replace('_', '-')}")
        assert main([*argv[:at], *argv[at + 2 :]]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[0])["token_ids"] != row["token_ids"]


def test_people_see_the_text_as_it_comes(
    opened: list[Any], text: Text, prompts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--prompt", "Is this so?", *LONG]) == 0
    out, err = capsys.readouterr()
    assert out == expected(text, "Is this so?").text + "\n"
    assert err.startswith("prompt: 12 tokens, ")
    assert err.endswith(" tokens/s, ended by length\n")
    assert main(["generate", "--prompts", prompts, *LONG]) == 0
    out = capsys.readouterr().out
    assert out == "".join(f"── {id}\n{expected(text, q).text}\n" for id, q in (("a", "Is this so?"), ("2", "你好")))


def test_the_order_of_prompts_changes_nothing(
    opened: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each begins with an empty cache, so that even rounding is the same."""
    reads: list[int] = []
    original = ToyTarget.prefill

    def prefill(self: ToyTarget, tokens: list[int], *more: Any) -> Any:
        reads.append(self.length)
        return original(self, tokens, *more)

    monkeypatch.setattr(ToyTarget, "prefill", prefill)
    (tmp_path / "p").write_text('{"id": 1, "prompt": "x"}\n{"id": 2, "prompt": "y"}\n{"id": 3, "prompt": "x"}\n')
    assert main(["generate", "--prompts", str(tmp_path / "p"), "--json", *LONG]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[0]["token_ids"] == rows[2]["token_ids"]
    assert reads == [0, 0, 0]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--prompt", "x", "--policy", "guess"],
            "policy is 'guess', expected plain or stop-and-wait or never-wait",
        ),
        (
            ["--prompt", "x", "--policy", "stop-and-wait"],
            "policy is stop-and-wait without a server, expected --server URL",
        ),
        (
            ["--prompt", "x", "--server", "localhost:80"],
            "server is 'localhost:80', expected ws://host:port or wss://host:port",
        ),
        (["--prompt", "x", "--codec", "int5"], "codec 'int5' is unknown, expected one of fp16, int8, int4"),
        ([], "got neither --prompts nor --prompt, expected one of them"),
        (["--prompt", "x", "--prompts", "y"], "got both --prompts and --prompt, expected one of them"),
        (["--prompts", "missing.jsonl"], "missing.jsonl cannot be read: no such file or directory"),
        (["--prompt", "x", "--logit-bias", "[1]"], "logit bias '[1]' cannot be read, expected JSON such as"),
        (["--prompt", "x", "--top-p", "0"], "top_p is 0.0, expected more than 0 and at most 1"),
        (["--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens is 0, expected 1 or more"),
        (["--prompt", "x", "--overflow", "no"], "overflow is 'no', expected one of error, truncate"),
        (["--prompt", "x" * 99, "--max-context", "50"], "prompt prompt: prompt has 1"),
    ],
)
def test_failures_are_one_line(
    opened: list[Any], capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert main(["generate", *argv]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"starsd-edge: {message}")
    assert err.count("\n") == 1


def test_a_long_prompt_can_be_cut(opened: list[Any], text: Text, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "--prompt", "Is this so? " * 30, "--max-context", "64", "--json", *LONG]
    assert main(argv) == 1
    assert "shorten it, or set overflow to truncate" in capsys.readouterr().err
    assert main([*argv, "--overflow", "truncate"]) == 0
    assert json.loads(capsys.readouterr().out)["new_tokens"] == 12


def test_without_the_edge_extra_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    for name in [name for name in sys.modules if name.startswith("starsd.edge.") and name != "starsd.edge.cli"]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["generate", "--prompt", "x"]) == 1
    assert capsys.readouterr().err == f"starsd-edge: {MissingExtraError('tokenizers', 'edge')}\n"


class Script:
    """A user who says these lines, then leaves; an exception is raised instead."""

    def __init__(self, *lines: str | type[BaseException]) -> None:
        self.lines: Iterator[str | type[BaseException]] = iter(lines)

    def __call__(self, prompt: str) -> str:
        line = next(self.lines, EOFError)
        if isinstance(line, str):
            return line
        raise line


def talk(session: Session, *lines: str | type[BaseException], **options: Any) -> tuple[ChatTerminal, str]:
    screen = io.StringIO()
    limits = options.pop("limits", LIMITS)
    console = Console(file=screen, width=80, highlight=False, emoji=False, markup=False)
    sampling = options.pop("sampling", SAMPLING)
    terminal = ChatTerminal(session, sampling, limits, console=console, ask=Script(*lines), **options)
    terminal.run()
    return terminal, screen.getvalue()


def test_a_conversation_is_remembered_and_read_once(text: Text) -> None:
    toy = ToyTarget()
    terminal, screen = talk(Session(toy, text), "Is this so?", "  ", "Yes.")
    assert [message["role"] for message in terminal.messages] == ["user", "assistant", "user", "assistant"]
    assert terminal.messages[1]["content"] == expected(text, "Is this so?").text
    assert screen.count("12 tokens · first after ") == 2
    assert screen.count(" tokens/s · cut at its longest") == 2
    both = text.encode_chat(terminal.messages[:3])
    assert len(toy.read) == 2
    assert toy.read[0] + toy.read[1] < len(both)  # the first answer was not read again, at most its end
    assert toy.rows[: len(both)] == both


def test_a_server_that_goes_away_is_told_once(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_news, "AWAY_SECONDS", -1.0)
    link = SimpleNamespace(url="ws://drafter.example:1", connected=False, channel=SimpleNamespace(notice=""))
    _, screen = talk(Session(ToyTarget(), text), "x", "y", link=link)
    assert screen.count("server at ws://drafter.example:1 is away; answers go on without it") == 1


def test_commands(text: Text) -> None:
    session = Session(ToyTarget(), text)
    terminal, screen = talk(session, "x", "/reset", "/nonsense", "/help", "/quit", "never said")
    assert terminal.messages == []
    assert session.target.length == 0
    assert "/nonsense is no command, expected one of /reset, /system, /help, /quit" in screen
    assert "/quit    leave, as Ctrl-D does" in screen
    terminal, screen = talk(session, "x", "/system Answer in verse.", "y", system="Be brief.")
    assert terminal.messages[0] == {"role": "system", "content": "Answer in verse."}
    assert [message["content"] for message in terminal.messages[1::2]] == ["y"]
    terminal, _ = talk(session, "/system", system="Be brief.")
    assert terminal.messages == []


def test_interrupts_stop_the_answer_not_the_program(text: Text) -> None:
    toy = ToyTarget()
    session, left = Session(toy, text), 0
    warm = Sampling(temperature=0.8, logit_bias={EOS: -100})
    original = toy.score

    def interrupted(*arguments: Any) -> Any:
        nonlocal left
        left += 1
        if left == 6:
            raise KeyboardInterrupt
        return original(*arguments)

    toy.score = interrupted  # type: ignore[method-assign]
    terminal, screen = talk(session, KeyboardInterrupt, "Is this so?", "Yes.", sampling=warm)
    assert "/quit or Ctrl-D leaves" in screen
    assert screen.count("\nstopped\n") == 1
    first, second = terminal.messages[1]["content"], terminal.messages[3]["content"]
    assert first
    assert expected(text, "Is this so?", warm).text.startswith(first)
    prompt = text.encode_chat(terminal.messages[:3])
    alone = list(Session(ToyTarget(), text).generate(prompt, warm, LIMITS, choice=2))[-1].outcome
    assert alone is not None
    assert second == alone.text


def test_an_answer_stopped_before_it_began_is_not_remembered(text: Text) -> None:
    toy = ToyTarget()

    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    toy.score = interrupted  # type: ignore[method-assign]
    terminal, screen = talk(Session(toy, text), "Is this so?")
    assert (terminal.messages, screen.count("\nstopped\n")) == ([], 1)


def test_what_does_not_fit_is_said_and_forgotten(text: Text) -> None:
    session = Session(ToyTarget(context=40), text)
    terminal, screen = talk(session, "Is this so? " * 20, "Yes.")
    assert "tokens, expected at most 40: shorten it" in screen
    assert [message["content"] for message in terminal.messages[:1]] == ["Yes."]
    terminal, screen = talk(session, "Is this so? " * 20, "Yes.", limits=Limits(max_new_tokens=5, overflow="truncate"))
    assert len(terminal.messages) == 4
    leading = text.encode("<s>be kind</s><s>user:", add_special_tokens=False)
    assert session.target.rows[: len(leading)] == leading  # type: ignore[attr-defined]
    with pytest.raises(ContextOverflowError):
        session.generate(text.encode_chat(terminal.messages), SAMPLING, LIMITS)


def test_a_model_cannot_steer_the_terminal(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    attack = text.encode("a\x1b[2Jb\x07\n\tc\x9b1m", add_special_tokens=False)
    script = iter([*attack, EOS])
    toy = ToyTarget()
    plain = toy.score

    def score(tokens: Any, parents: Any) -> Any:
        logits = plain(tokens, parents)
        logits[0, next(script)] = 1000
        return logits

    toy.score = score  # type: ignore[method-assign]
    _, screen = talk(Session(toy, text), "x", limits=Limits(max_new_tokens=50))
    assert "a[2Jb\n\tc1m" in screen
    assert not {"\x1b", "\x07", "\x9b"} & set(screen)


@pytest.mark.model
def test_the_default_model_answers(smollm2_folder: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Exports the bundle if it is not there; the prompt's capital is one that even a small model knows."""
    (tmp_path / "p").write_text('{"id": "a", "turns": ["What is the capital of France?"]}\n')
    argv = ["generate", "--prompts", str(tmp_path / "p"), "--max-new-tokens", "24", "--json"]
    rows = []
    for _ in range(2):
        assert main(argv) == 0
        [line] = capfd.readouterr().out.splitlines()
        rows.append(json.loads(line))
    assert list(rows[0]) == KEYS
    assert "Paris" in rows[0]["text"]
    assert rows[0]["token_ids"] == rows[1]["token_ids"]
    sampled = [*argv, "--temperature", "0.8", "--seed", "3"]
    assert [main(sampled), main(sampled)] == [0, 0]
    first, second = (json.loads(line) for line in capfd.readouterr().out.splitlines())
    assert first["token_ids"] == second["token_ids"] != rows[0]["token_ids"]


def test_the_edge_runs_without_torch_and_transformers() -> None:
    """Whatever the commands import, in a process of its own."""
    modules = "answer, bundle, chat_terminal, cli, generate, session, target, target_onnx, text, verify"
    code = f"import sys; from starsd.edge import {modules}; print(*{{'torch', 'transformers'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
