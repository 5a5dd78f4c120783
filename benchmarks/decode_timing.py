"""How `decode.py` measures: stamps inside `generate`, contenders in turns, bandwidth between the turns."""

import random
import statistics
import sys
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from decode_contenders import Contender, Prompt, cache_bytes
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

T = TypeVar("T")


class Stamps(LogitsProcessor):
    """Notes the time at every step and changes nothing.

    On a GPU a stamp comes before its step's kernels are done, but after those of the step before, for which `generate`
    waits; so differences between stamps are whole steps there, too.
    """

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """The scores as they are."""
        self.times.append(time.perf_counter())
        return scores


@dataclass(frozen=True)
class Run:
    """One call of `generate`.

    Attributes:
        tokens: New tokens, (B, number of steps + 1).
        stamps_s: When each of them was computed, counted from the call.
        cache_bytes: Held at the end.
        passing_bytes: Held beside that for a moment of every step.
    """

    tokens: torch.Tensor
    stamps_s: list[float]
    cache_bytes: int
    passing_bytes: int

    @property
    def ms_per_token(self) -> float:
        """Mean over all steps but the first."""
        return 1000 * (self.stamps_s[-1] - self.stamps_s[0]) / (len(self.stamps_s) - 1)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def generate(model: PreTrainedModel, ids: torch.Tensor, num_tokens: int, cache: Any = None, **arguments: Any) -> Run:
    """Greedy decoding of exactly `num_tokens`, with a stamp at each."""
    stamps = Stamps()
    if cache is not None:
        arguments["cache"] = cache
    synchronize(ids.device)
    started = time.perf_counter()
    output = model.generate(  # pyright: ignore[reportCallIssue] - a mixin that the class hint does not show
        ids, do_sample=False, max_new_tokens=num_tokens, logits_processor=LogitsProcessorList([stamps]), **arguments
    )
    synchronize(ids.device)
    assert isinstance(output, torch.Tensor)
    held, passing = cache_bytes(cache)
    return Run(output[:, ids.shape[1] :].cpu(), [stamp - started for stamp in stamps.times], held, passing)


def decode(contender: Contender, prompt: Prompt, batch_size: int, num_tokens: int) -> Run:
    """One run of a contender from a cache that holds the prompt: `num_tokens` timed steps after one that is not."""
    num_tokens = 1 + min(num_tokens, contender.max_tokens or num_tokens)
    cache = contender.new_cache(prompt, batch_size, prompt.length + num_tokens)
    return generate(contender.model, prompt.batch(batch_size), num_tokens, cache, **contender.arguments)


class Progress:
    """One line on stderr that says what is being measured; without a terminal, a line for each new heading."""

    def __init__(self) -> None:
        self._started, self._heading, self._is_terminal = time.monotonic(), "", sys.stderr.isatty()

    def __call__(self, heading: str, detail: str = "") -> None:
        """Show it."""
        elapsed = f"[{time.monotonic() - self._started:5.0f} s]"
        if self._is_terminal:
            print(f"\r\x1b[K{elapsed} {heading}  {detail}", end="", file=sys.stderr, flush=True)
        elif heading != self._heading:
            print(f"{elapsed} {heading}", file=sys.stderr, flush=True)
        self._heading = heading

    def note(self, text: str) -> None:
        """Say something that stays."""
        print(f"\r\x1b[K{text}" if self._is_terminal else text, file=sys.stderr, flush=True)


@dataclass
class Outcome(Generic[T]):
    """What became of one contender: its results, or why there are none; `warm_up_s` is its first run, whole."""

    warm_ups: list[T] = field(default_factory=list)
    warm_up_s: float = 0.0
    results: list[T] = field(default_factory=list)
    error: str | None = None


@dataclass
class Turns:
    """Runs contenders in turns: every round each of them once, in an order drawn anew."""

    num_rounds: int
    rng: random.Random
    progress: Progress

    def take(
        self,
        heading: str,
        tasks: Mapping[str, Callable[[], T]],
        warm_ups: Mapping[str, Callable[[], T]] | None = None,
        warm_up_again: Container[str] = (),
        after_round: Callable[[], None] = lambda: None,
    ) -> dict[str, Outcome[T]]:
        """Warm up, then measure.

        Args:
            heading: For the progress line.
            tasks: What each contender does in its turn.
            warm_ups: What it does before the first round, if not the same.
            warm_up_again: Who needs two of them, as what is compiled at the first may be compiled anew at the second.
            after_round: Called after each round.
        """
        outcomes: dict[str, Outcome[T]] = {name: Outcome() for name in tasks}
        for name, warm_up in (warm_ups or tasks).items():
            self.progress(heading, f"warm-up: {name}")
            started = time.perf_counter()
            self._attempt(heading, name, outcomes[name], outcomes[name].warm_ups, warm_up)
            outcomes[name].warm_up_s = time.perf_counter() - started
            if name in warm_up_again:
                self._attempt(heading, name, outcomes[name], outcomes[name].warm_ups, warm_up)
        for number in range(self.num_rounds):
            for name in self.rng.sample(list(tasks), len(tasks)):
                self.progress(heading, f"round {number + 1} of {self.num_rounds}: {name}")
                self._attempt(heading, name, outcomes[name], outcomes[name].results, tasks[name])
            after_round()
        return outcomes

    def _attempt(self, heading: str, name: str, outcome: Outcome[T], results: list[T], task: Callable[[], T]) -> None:
        if outcome.error is not None:
            return
        try:
            results.append(task())
        except Exception as error:  # one contender's failure is a result, not the end of the run
            outcome.error = reason(error)
            self.progress.note(f"{heading}, {name} failed: {outcome.error}")


def reason(error: Exception) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


class Bandwidth:
    """Bytes per second that one large matrix-vector product reads here: the ceiling of decoding."""

    def __init__(self, device: torch.device, dtype: torch.dtype, num_bytes: int) -> None:
        self._rows = max(num_bytes // dtype.itemsize // 16_384, 1)
        self._matrix = torch.ones(self._rows, 16_384, device=device, dtype=dtype)
        self._vector = torch.ones(1, 16_384, device=device, dtype=dtype)
        self.bytes_per_second: list[float] = []
        self.sample()
        self.bytes_per_second.clear()  # the first one touched its memory for the first time

    def sample(self, repeats: int = 4) -> None:
        """Take some more values."""
        for _ in range(repeats):
            synchronize(self._matrix.device)
            started = time.perf_counter()
            F.linear(self._vector, self._matrix)
            synchronize(self._matrix.device)
            self.bytes_per_second.append(self._matrix.nbytes / (time.perf_counter() - started))


def summary(values: list[float]) -> dict[str, Any]:
    """Median, quartiles, extremes, and all values in the order in which they were measured."""
    low, median, high = (
        statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    )  # fmt: skip
    return {
        "median": median, "low": low, "high": high, "min": min(values), "max": max(values), "samples": values,
    }  # fmt: skip


def timed(action: Callable[[], Any], device: torch.device) -> float:
    """Seconds that it takes; what it returns is freed after the clock has stopped."""
    synchronize(device)
    started = time.perf_counter()
    result = action()
    synchronize(device)
    duration = time.perf_counter() - started
    del result
    return duration
