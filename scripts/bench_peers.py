"""Plain decoding by other engines on the same weights and threads, each in a process of its own, one at a time.

A peer loads once and then decodes on request, so that rounds of several peers can be interleaved: machines drift, and
only figures taken side by side compare.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from starsd.shared.errors import StarsdError

Step = Callable[[], None]  # decodes one token
Make = Callable[[Path, Sequence[int], int], Step]  # folder or file, prompt, threads


class Peer:
    """A child process around `make(folder, prompt, threads) -> Step`; `milliseconds` times one step there."""

    def __init__(
        self, make: Callable[[Path, Sequence[int], int], Step], folder: Path, prompt: Sequence[int], threads: int
    ):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, folder, list(prompt), threads), daemon=True)
        self._process.start()
        theirs.close()
        self.missing = self._receive()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pipe.close()
        self._process.join(timeout=5)
        self._process.kill()

    def milliseconds(self, steps: int) -> float:
        """Median time of a step over `steps`."""
        self._pipe.send(steps)
        return float(self._receive())

    def _receive(self) -> Any:
        try:
            answer = self._pipe.recv()
        except EOFError:
            raise StarsdError("a peer died while it was measured") from None
        if isinstance(answer, Exception):
            raise StarsdError(f"a peer failed: {answer}")
        return answer


def _serve(pipe: Connection, make: Make, folder: Path, prompt: list[int], threads: int) -> None:
    """First answer: the library that is missing, or None. Then the median step time for each count that comes."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    warnings.simplefilter("ignore")  # of the peers' own libraries
    try:
        step = make(folder, prompt, threads)
    except ModuleNotFoundError as error:
        pipe.send(error.name)
        return
    except Exception as error:  # goes to the parent, which names the peer
        pipe.send(StarsdError(str(error)))
        return
    pipe.send(None)
    while True:
        try:
            count = pipe.recv()
        except EOFError:
            return
        times = []
        for _ in range(count):
            started = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - started))
        pipe.send(statistics.median(times))


def ours(folder: Path, prompt: Sequence[int], threads: int) -> Step:
    """The bundle in `folder`, in its exact path: score, argmax, commit."""
    from starsd.edge.target import open_target
    from starsd.shared.config import Engine

    target = open_target("onnx", folder, Engine(threads=threads))
    target.prefill(prompt[:-1])
    tip = prompt[-1]

    def step() -> None:
        nonlocal tip
        tip = int(target.score([tip], [-1])[0].argmax())
        target.commit([0])

    return step


def transformers_fp32(folder: Path, prompt: Sequence[int], threads: int) -> Step:
    """Greedy steps on the library's own cache: what `generate` does, without its bookkeeping."""
    import torch
    import transformers

    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    cache = transformers.DynamicCache(config=model.config)
    ids = torch.tensor([list(prompt)])

    def step() -> None:
        nonlocal ids
        with torch.inference_mode():
            logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        ids = logits[:, -1].argmax(-1, keepdim=True)

    step()
    return step


def llama_cpp(gguf: Path, prompt: Sequence[int], threads: int) -> Step:
    """llama.cpp through its Python binding, on the GGUF itself."""
    from llama_cpp import Llama

    model = Llama(str(gguf), n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)
    model.eval(list(prompt))

    def step() -> None:
        model.eval([model.sample(temp=0.0)])

    return step
