"""Recordings of greedy answers, their file, and the target that replays them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tiny_session import EOS, VOCAB, ToyTarget, outcome_of, toy_logits, write_text_files

from starsd.edge.recordings import Header, Recording, Recordings, read_recordings, record_run, write_recordings
from starsd.edge.session import Session
from starsd.edge.target_replay import ReplayTarget
from starsd.edge.text import Text
from starsd.scripts import bench_record
from starsd.scripts.cli import main
from starsd.shared import manifest
from starsd.shared.config import Limits, Sampling
from starsd.shared.console import no_progress
from starsd.shared.errors import ContextOverflowError, EngineError, UsageError
from starsd.shared.manifest import FeatureSpec, ModelShape

WIDTH = 4
SHAPE = ModelShape(layers=1, hidden=4, heads=1, kv_heads=1, head_dim=4, vocab=VOCAB, context=200)
HEADER = Header(
    model="toy",
    fingerprint="f",
    precision="int8",
    shape=SHAPE,
    features=FeatureSpec((), True, WIDTH),
    eos=(EOS,),
    runs=(),
)
PROMPTS = ([7, 8, 9, 21], [7, 8, 9, 51], [20, 6])  # the last one's answer ends after 5 tokens, the others' go on


class Featured(ToyTarget):
    """Its features say which row they are of, and which token."""

    def prefill(self, tokens, progress=no_progress):  # type: ignore[no-untyped-def]
        super().prefill(tokens, progress)
        return self._features(len(tokens))

    def commit(self, rows):  # type: ignore[no-untyped-def]
        super().commit(rows)
        return self._features(len(rows))

    def _features(self, count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        start = len(self.rows) - count
        values = [[start + i, self.rows[start + i], 0.5, -1] for i in range(count)]
        return np.array(values, np.float32).reshape(count, WIDTH)


def recorded(most: int = 12) -> list[Recording]:
    return [record_run(Featured(), f"p{i}", prompt, [EOS], most) for i, prompt in enumerate(PROMPTS)]


@pytest.fixture
def recordings(tmp_path: Path) -> Recordings:
    write_recordings(tmp_path / "toy.npz", HEADER, recorded())
    return read_recordings(tmp_path / "toy.npz")


@pytest.fixture
def text(tmp_path: Path) -> Text:
    return Text.open(write_text_files(tmp_path / "text"))


def test_a_run_is_the_greedy_answer_with_its_features() -> None:
    run = recorded()[0]
    tokens = list(run.tokens)
    for at in range(4, len(tokens)):
        assert tokens[at] == toy_logits(tokens[:at]).argmax()
    assert (run.prompt, tokens[:4], len(tokens)) == (4, PROMPTS[0], 16)
    assert run.features.tolist() == [[i, tokens[i], 0.5, -1] for i in range(15)]


def test_a_run_ends_with_the_end_token() -> None:
    run = record_run(Featured(), "long", [1, 2], [EOS], 5000)
    assert run.ended
    assert list(run.tokens).index(EOS, 2) == len(run.tokens) - 1
    assert [run.ended for run in recorded()] == [False, False, True]


def test_features_beyond_float16_are_refused() -> None:
    class Loud(Featured):
        def _features(self, count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
            return np.full((count, WIDTH), 7e4, np.float32)

    with pytest.raises(EngineError, match=r"^features of run p are beyond 65504.0, expected values of float16$"):
        record_run(Loud(), "p", [3, 4], [EOS], 2)


def test_the_file_holds_what_was_recorded(recordings: Recordings) -> None:
    assert msgspec.structs.replace(recordings.header, runs=()) == HEADER
    for got, expected in zip(recordings.runs, recorded(), strict=True):
        assert (got.id, got.prompt, got.ended) == (expected.id, expected.prompt, expected.ended)
        assert (got.tokens == expected.tokens).all()
        assert (got.features == expected.features).all()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_session_says_what_was_recorded(recordings: Recordings, text: Text, prompt: list[int]) -> None:
    limits = Limits(max_new_tokens=12)
    real = outcome_of(Session(ToyTarget(), text), prompt, Sampling(), limits)
    replayed = outcome_of(Session(ReplayTarget(recordings), text), prompt, Sampling(), limits)
    assert replayed.token_ids == real.token_ids
    assert replayed.finish_reason == real.finish_reason


def test_one_session_replays_one_prompt_after_the_other(recordings: Recordings, text: Text) -> None:
    session = Session(ReplayTarget(recordings), text)
    for prompt, run in zip(PROMPTS, recordings.runs, strict=True):
        ids = outcome_of(session, prompt, Sampling(), Limits(max_new_tokens=4)).token_ids
        assert ids == run.tokens[run.prompt :][:4].tolist()


def test_who_asks_for_more_gets_the_end(recordings: Recordings, text: Text) -> None:
    run = recordings.runs[0]
    assert not run.ended
    outcome = outcome_of(Session(ReplayTarget(recordings), text), PROMPTS[0], Sampling(), Limits(max_new_tokens=50))
    assert outcome.token_ids == run.tokens[run.prompt :].tolist()
    assert outcome.finish_reason == "stop"


def test_a_tree_is_answered_along_the_recording_and_features_are_its_rows(recordings: Recordings) -> None:
    target, run = ReplayTarget(recordings), recordings.runs[0]
    said = [int(token) for token in run.tokens]
    assert (target.prefill(said[:3]) == run.features[:3]).all()
    wrong = next(token for token in range(5, VOCAB) if token not in said)
    #        tip      right     wrong  right    below wrong, though it is the token after it
    tokens = [said[3], said[4], wrong, said[5], said[5]]
    logits = target.score(tokens, [-1, 0, 0, 1, 2])
    assert logits.shape == (5, VOCAB)
    assert [int(row.argmax()) for row in logits[[0, 1, 3]]] == said[4:7]
    assert not logits[[2, 4]].any()
    assert (target.commit([0, 1, 3]) == run.features[3:6]).all()
    assert target.length == 6
    assert int(target.score([said[6]], [-1])[0].argmax()) == said[7]
    target.truncate(4)
    assert int(target.score([said[4]], [-1])[0].argmax()) == said[5]


def test_prompts_are_told_apart_by_their_last_token(recordings: Recordings) -> None:
    target = ReplayTarget(recordings)
    for run in recordings.runs[:2]:
        target.truncate(0)
        target.prefill(PROMPTS[0][:1])  # in pieces, as it may be read
        target.prefill(PROMPTS[0][1:3])
        assert target.score([run.tokens[3]], [-1])[0].argmax() == run.tokens[4]


def test_a_prompt_of_one_token() -> None:
    run = record_run(Featured(), 1, [22], [EOS], 4)
    target = ReplayTarget(Recordings(HEADER, (run,)))
    said = run.tokens.tolist()
    assert target.prefill([]).shape == (0, WIDTH)
    assert [row.argmax() for row in target.score([22, said[1], 22], [-1, 0, 0])][:2] == said[1:3]
    assert not target.score([22, 22], [-1, 0])[1].any()


def test_what_was_not_recorded_is_refused(recordings: Recordings, text: Text) -> None:
    target = ReplayTarget(recordings)
    known = "a replay knows recorded prompts and their greedy answers only$"
    with pytest.raises(UsageError, match=f"^none of 3 recordings begins with these 2 tokens: {known}"):
        target.prefill([7, 9])
    assert target.length == 0
    target.prefill([7, 8])
    with pytest.raises(UsageError, match=f"^none of 3 recordings begins with these 3 tokens: {known}"):
        target.score([9], [-1])  # within the prompt: what the model would say there was not recorded
    with pytest.raises(UsageError, match=f"^none of 3 recordings begins with these .* tokens: {known}"):
        outcome_of(Session(ReplayTarget(recordings), text), PROMPTS[0], Sampling(temperature=2e4), Limits())


def test_it_keeps_a_targets_contract(recordings: Recordings) -> None:
    target = ReplayTarget(recordings)
    assert (target.noise, target.branch_noise, target.context) == (0.0, 0.0, 200)
    assert (target.shape, target.features) == (SHAPE, HEADER.features)
    target.prefill([7, 8, 9])
    with pytest.raises(EngineError, match=r"^commit without a pass: score a tree first$"):
        target.commit([0])
    target.score([21, 3, 4], [-1, 0, 0])
    with pytest.raises(EngineError, match=r"^rows \[1\] are not a path from the root of the newest pass$"):
        target.commit([1])
    with pytest.raises(ContextOverflowError, match=r"^203 tokens do not fit, the context holds 200$"):
        target.score([21] * 200, list(range(-1, 199)))


def rewritten(path: Path, **changes: Any) -> Path:
    """The good file with some arrays replaced; None leaves one out."""
    write_recordings(path, HEADER, recorded())
    with np.load(path) as file:
        arrays = {**dict(file), **changes}
    np.savez(path, **{name: values for name, values in arrays.items() if values is not None})
    return path


def header_with(path: Path, change: Callable[[dict[str, Any]], object]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    write_recordings(path, HEADER, recorded())
    with np.load(path) as file:
        raw = json.loads(file["header"].tobytes())
    change(raw)
    return np.frombuffer(json.dumps(raw).encode(), np.uint8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": None}, "it has arrays ['header', 'tokens'], expected ['features', 'header', 'tokens']"),
        ({"tokens": np.zeros(39)}, "tokens are float64 in 1 dimensions, expected int32 in 1"),
        ({"tokens": np.zeros(38, np.int32)}, "there are 38 tokens, the runs have 39"),
        ({"tokens": np.full(39, VOCAB, np.int32)}, "token ids are 300 to 300, expected 0 to 299"),
        ({"features": np.zeros((36, 5), np.float16)}, "features have shape [36, 5], expected [36, 4]"),
        ({"features": np.full((36, 4), np.nan, np.float16)}, "features are not finite, expected finite numbers"),
        ({"header": np.frombuffer(b"{}", np.uint8)}, "Object missing required field `model`"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = rewritten(tmp_path / "bad.npz", **changes)
    with pytest.raises(UsageError) as error:
        read_recordings(path)
    assert str(error.value) == f"recording {path} cannot be read: {message}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h.update(format=2), "format is 2, expected 1: record it again"),
        (lambda h: h.update(runs=[]), "there are no runs or no end tokens, expected both"),
        (lambda h: h["runs"][0].update(prompt=0), "run p0 has 0 of 16 tokens as prompt, expected 1 to 15"),
        (lambda h: h["runs"][0].update(prompt=16), "run p0 has 16 of 16 tokens as prompt, expected 1 to 15"),
        (lambda h: h["runs"][0].update(ended=True), "run p0 ends with token"),
        (lambda h: h.update(extra=1), "Object contains unknown field `extra`"),
    ],
)
def test_headers_that_are_refused(tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    header = header_with(tmp_path / "good.npz", change)
    path = rewritten(tmp_path / "bad.npz", header=header)
    with pytest.raises(UsageError) as error:
        read_recordings(path)
    assert str(error.value).startswith(f"recording {path} cannot be read: {message}")


def test_what_is_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none.npz cannot be read: no such file or directory$"):
        read_recordings(tmp_path / "none.npz")
    np.save(tmp_path / "single.npy", np.zeros(3))
    with pytest.raises(UsageError, match=r"single.npy cannot be read: it is a single array, expected .npz$"):
        read_recordings(tmp_path / "single.npy")
    (tmp_path / "text.npz").write_text("no")
    with pytest.raises(UsageError, match=r"text.npz cannot be read: "):
        read_recordings(tmp_path / "text.npz")


@pytest.mark.model
def test_the_command_records_the_real_engine(
    smollm2_bundle: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bundle, out = smollm2_bundle("int4"), tmp_path / "out.npz"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": 3, "prompt": "Name a colour."}\n{"id": "b", "prompt": "Say hello."}\n')
    argv = ["bench", "record", "--model", str(bundle), "--prompts", str(prompts), "--max-new-tokens", "8"]
    assert main([*argv, "--out", str(out), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["file"], row["prompts"], row["bytes"]) == (str(out), 2, out.stat().st_size)

    text = Text.open(bundle)
    recordings = read_recordings(out)
    assert [run.id for run in recordings.runs] == [3, "b"]
    target = bench_record.open_target("onnx", bundle, bench_record.Engine())
    for run in recordings.runs:
        limits = Limits(max_new_tokens=8)
        prompt = run.tokens[: run.prompt].tolist()
        real = outcome_of(Session(target, text), prompt, Sampling(), limits)
        assert real == msgspec.structs.replace(
            outcome_of(Session(ReplayTarget(recordings), text), prompt, Sampling(), limits),
            seconds=real.seconds,
            prefill_seconds=real.prefill_seconds,
            near_ties=real.near_ties,
        )
        assert target.length == len(run.tokens) - 1
        np.testing.assert_array_equal(ReplayTarget(recordings).prefill(prompt), run.features[: run.prompt])


def test_recordings_are_made_once_for_each_engine_prompts_and_length(
    tmp_path: Path, starsd_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def record(bundle: Path, prompts: Path, most: int, out: Path, *_: object) -> None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.touch()
        made.append(out)

    monkeypatch.setattr(bench_record, "record", record)
    bundle, prompts = tmp_path / "bundle", tmp_path / "prompts.jsonl"
    write_bundle(bundle, "int8")
    prompts.write_text('{"id": 1, "prompt": "a"}\n')

    def ensure(most: int) -> Path:
        return bench_record.ensure_recording(str(bundle), None, prompts, most, no_progress)

    first = ensure(8)
    assert first.parent == starsd_home / "recordings"
    assert first.name.startswith("toy-int8-8-")
    assert ensure(8) == first
    assert made == [first]
    ensure(9)
    prompts.write_text('{"id": 1, "prompt": "b"}\n')
    ensure(8)
    write_bundle(bundle, "int4")
    ensure(8)
    assert len(set(made)) == len(made) == 4


def write_bundle(folder: Path, precision: str) -> None:
    """As much of a bundle as its manifest needs."""
    folder.mkdir(exist_ok=True)
    for name in manifest.NEEDED_FILES:
        (folder / name).write_text(precision)
    manifest.write(
        manifest.Manifest(
            name="toy",
            source="toy",
            fingerprint="f",
            architecture="llama",
            flavour="ort",
            precision=precision,
            shape=SHAPE,
            features=HEADER.features,
            eos=(EOS,),
            files={name: manifest.entry(folder / name) for name in manifest.NEEDED_FILES},
        ),
        folder,
    )


@pytest.mark.model
def test_prompts_that_cannot_be_recorded(
    smollm2_bundle: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["bench", "record", "--model", str(smollm2_bundle("int4")), "--out", str(tmp_path / "out.npz")]
    assert main([*argv, "--prompts", str(tmp_path / "none")]) == 1
    said = f"starsd: {tmp_path / 'none'} cannot be read: no such file or directory\n"
    assert capsys.readouterr().err == said
    (tmp_path / "long").write_text(json.dumps({"id": "x", "prompt": "word " * 9000}))
    assert main([*argv, "--prompts", str(tmp_path / "long")]) == 1
    assert "\nstarsd: prompt x: prompt has 9" in capsys.readouterr().err
    assert not (tmp_path / "out.npz").exists()
