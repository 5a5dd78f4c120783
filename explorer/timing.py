"""Inference as `generate()` does it, pass by pass: prefill and decode with the cache, and the same without one.

The tokens are given, so that every repetition does the same work.
"""

import inspect
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from tercet.explorer.costs import LayerBytes, WeightBytes, cache_layers, counted_flops
from tercet.explorer.reach import Reach, num_keys
from tercet.explorer.record import StepFacts

_MAX_REPETITIONS = 7
_CACHE_NAMES = ("cache", "past_key_values")  # the second until transformers 5.24, and in code that checkpoints carry


@dataclass
class PassFacts:
    """One pass.

    Attributes:
        num_queries: Tokens given to the model.
        num_tokens: Tokens so far, these included.
        flops: Of all matrix products.
        before: Of each layer of the cache that the pass was given.
        after: Of each layer of the cache that it left.
        durations_s: Of each repetition.
    """

    num_queries: int
    num_tokens: int
    flops: int = 0
    before: list[LayerBytes] = field(default_factory=list)
    after: list[LayerBytes] = field(default_factory=list)
    durations_s: list[float] = field(default_factory=list)


@dataclass
class Inference:
    """Passes with a cache, the first over the prompt, and without one; `cached` is empty if the model keeps none."""

    cached: list[PassFacts]
    uncached: list[PassFacts]


def measure_inference(
    model: PreTrainedModel, ids: torch.Tensor, num_prompt_tokens: int, *, budget_s: float, step: Callable[[str], None]
) -> Inference:
    """Run all passes once to count and to warm up, then again and again within the budget, at least once, to time them.

    Args:
        model: In evaluation mode.
        ids: The prompt and the new tokens, (1, S).
        num_prompt_tokens: P.
        budget_s: Seconds that the timed repetitions may take together.
        step: Told what is done.
    """
    runner = _Runner(model, ids, num_prompt_tokens)
    step("counting the work of each pass")
    with torch.no_grad():
        inference = runner.count(step)
        spent, repetitions = 0.0, 0
        while repetitions < _MAX_REPETITIONS and (repetitions == 0 or spent + spent / repetitions <= budget_s):
            step(f"timing, round {repetitions + 1}")
            started = time.perf_counter()
            runner.time(inference, step)
            spent, repetitions = spent + time.perf_counter() - started, repetitions + 1
    return inference


class _Runner:
    def __init__(self, model: PreTrainedModel, ids: torch.Tensor, num_prompt_tokens: int) -> None:
        self.model, self.ids, self.num_prompt_tokens = model, ids, num_prompt_tokens
        # As `generate()`: the head is asked for the last token alone, where the model can be asked so.
        has_choice = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.wanted: dict[str, Any] = {"return_dict": True, **({"logits_to_keep": 1} if has_choice else {})}

    def cached_ranges(self) -> list[tuple[int, int]]:
        """First and last token of each pass: the prompt, then one at a time; the last token is never given."""
        prompt, total = self.num_prompt_tokens, self.ids.shape[1]
        return [(0, prompt), *((end - 1, end) for end in range(prompt + 1, total))]

    def uncached_ranges(self) -> list[tuple[int, int]]:
        return [(0, end) for end in range(self.num_prompt_tokens, self.ids.shape[1])]

    def count(self, step: Callable[[str], None]) -> Inference:
        cached, cache = [], {}
        for start, end in self.cached_ranges():
            step("")
            facts = PassFacts(end - start, end, before=cache_layers(_only(cache)))
            with counted_flops() as counter:
                cache = self.forward(start, end, cache)
            facts.flops, facts.after = counter.get_total_flops(), cache_layers(_only(cache))
            cached.append(facts)
            if not facts.after:
                cached = []
                break
        uncached = []
        for start, end in self.uncached_ranges():
            step("")
            with counted_flops() as counter:
                self.forward(start, end, None)
            uncached.append(PassFacts(end - start, end, counter.get_total_flops()))
        return Inference(cached, uncached)

    def time(self, inference: Inference, step: Callable[[str], None]) -> None:
        cache: dict[str, Any] = {}
        for facts in inference.cached:
            step("")
            started = self.now()
            cache = self.forward(facts.num_tokens - facts.num_queries, facts.num_tokens, cache)
            facts.durations_s.append(self.now() - started)
        for facts in inference.uncached:
            step("")
            started = self.now()
            self.forward(0, facts.num_tokens, None)
            facts.durations_s.append(self.now() - started)

    def forward(self, start: int, end: int, cache: dict[str, Any] | None) -> dict[str, Any]:
        """One pass; with the cache of the pass before it by the name that the model gives it, with none for None."""
        ids = self.ids[:, start:end]
        if cache is None:
            self.model(input_ids=ids, use_cache=False, **self.wanted)
            return {}
        output = self.model(input_ids=ids, use_cache=True, **cache, **self.wanted)
        name = next((name for name in _CACHE_NAMES if output.get(name) is not None), None)
        return {} if name is None else {name: output[name]}

    def now(self) -> float:
        if self.ids.is_cuda:
            torch.cuda.synchronize(self.ids.device)
        return time.perf_counter()


def _only(cache: dict[str, Any]) -> Any:
    return next(iter(cache.values()), None)


def make_steps(passes: Sequence[PassFacts], weights: WeightBytes, reaches: Sequence[Reach]) -> tuple[StepFacts, ...]:
    """The passes as the record has them.

    Args:
        passes: Timed at least once.
        weights: Of the model.
        reaches: Of each layer, how far back it sees.
    """
    return tuple(
        StepFacts(
            num_queries=facts.num_queries,
            num_keys=max(num_keys(facts.num_tokens, reach) for reach in reaches),
            flops=facts.flops,
            weight_bytes_read=weights.of_pass(facts.num_queries),
            cache_bytes_read=sum(layer.visible for layer in facts.before),
            cache_bytes=sum(layer.held for layer in facts.after),
            cache_bytes_per_layer=tuple(layer.held for layer in facts.after) or (0,) * len(reaches),
            cache_bytes_allocated=sum(layer.allocated for layer in facts.after),
            duration_s=statistics.median(facts.durations_s),
            token=facts.num_tokens,
        )
        for facts in passes
    )
