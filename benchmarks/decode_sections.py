"""What `decode.py` measures, section by section; each function returns what goes into decode.json.

Shapes: B batch, T tokens, L layers, K key/value heads, D head_dim.
"""

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from decode_contenders import (
    CONTENDERS,
    REFERENCE,
    SHAPES,
    Contender,
    Prompt,
    forked_cache,
    make_contender,
    make_models,
    tercet_cache,
    weight_bytes,
)
from decode_timing import Bandwidth, Outcome, Progress, Run, Turns, decode, generate, reason, summary, timed
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from tercet.modeling import TercetCache, TercetForCausalLM


@dataclass(frozen=True)
class Plan:
    """Sizes of a run; lists go through every section that knows the word."""

    shape: str = "32M"
    batches: tuple[int, ...] = (1, 8, 32)
    contexts: tuple[int, ...] = (256, 1024, 4096)
    contenders: tuple[str, ...] = ("dynamic", "static", "no-cache", "tercet", "tercet-compiled")
    num_rounds: int = 7
    num_tokens: int | None = None
    distinct_rows: int = 4
    largest_without_cache: int = 2048
    prefill_batches: tuple[int, ...] = (1, 8)
    prefill_tokens: int = 1024
    uncached_tokens: int = 300
    uncached_prompt: int = 16
    uncached_rounds: int = 3
    quantized_batches: tuple[int, ...] = (1, 8)
    quantized_contexts: tuple[int, ...] = (1024, 4096)
    fork_rows: int = 8
    fork_tokens: int = 2048
    fork_rounds: int = 3
    bandwidth_bytes: int = 512 * 2**20

    def steps(self, batch_size: int, context: int) -> int:
        """Timed steps in a run: fewer where one takes long."""
        return self.num_tokens or (64 if batch_size * context <= 4096 else 32 if batch_size * context <= 32_768 else 16)


SMOKE = Plan(
    shape="tiny", batches=(1, 2), contexts=(32, 64), num_rounds=2, num_tokens=6, distinct_rows=2,
    largest_without_cache=64, prefill_batches=(1, 2), prefill_tokens=64, uncached_tokens=40, uncached_rounds=2,
    quantized_batches=(1,), quantized_contexts=(64,), fork_rows=2, fork_tokens=64, fork_rounds=2,
    bandwidth_bytes=2**23,
)  # fmt: skip


class Bench:
    """The models under test, and what every section uses."""

    def __init__(self, plan: Plan, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.plan, self.device, self.dtype = plan, device, dtype
        self.rng = random.Random(seed)
        self.progress = Progress()
        self._generator = torch.Generator().manual_seed(seed)
        self._prompt: Prompt | None = None

    @cached_property
    def models(self) -> tuple[TercetForCausalLM, PreTrainedModel]:
        """Tercet and Llama with the same weights."""
        return make_models(SHAPES[self.plan.shape], self.device, self.dtype)

    @cached_property
    def bandwidth(self) -> Bandwidth:
        """Measured between the turns of whoever asks."""
        # A GPU reads half a gigabyte in the time that it takes to ask it to.
        scale = 4 if self.device.type == "cuda" else 1
        return Bandwidth(self.device, self.dtype, scale * self.plan.bandwidth_bytes)

    def turns(self, num_rounds: int | None = None) -> Turns:
        """Contenders in turns."""
        return Turns(num_rounds or self.plan.num_rounds, self.rng, self.progress)

    def ids(self, num_rows: int, num_tokens: int) -> torch.Tensor:
        """Random token ids, (num_rows, num_tokens)."""
        shape = (num_rows, num_tokens)
        return torch.randint(SHAPES[self.plan.shape].vocab_size, shape, generator=self._generator).to(self.device)

    def prompt(self, context: int, num_rows: int) -> Prompt:
        """`context` positions in the cache and one token to go on from; the last prompt is kept and used again."""
        if self._prompt is None or self._prompt.length != context or self._prompt.ids.shape[0] != num_rows:
            self.progress(f"prompt of {context} tokens")
            self._prompt = None
            self._prompt = Prompt(self.models[1], self.ids(num_rows, context + 1))
        return self._prompt


def decode_section(bench: Bench) -> dict[str, Any]:
    """ms/token of every contender at every batch size and context."""
    plan, cells = bench.plan, []
    for context in plan.contexts:
        for batch_size in plan.batches:
            # Compiled code of an earlier cell would make this one's shapes dynamic, which nobody's first run has.
            torch.compiler.reset()
            contenders: dict[str, Contender | str] = {}
            for key in plan.contenders:
                contenders[CONTENDERS[key]] = _contender_or_reason(bench, key, batch_size * context)
            cells.append(_decode_cell(bench, "decode", contenders, batch_size, context, plan.distinct_rows))
    return {"cells": cells}


def _contender_or_reason(bench: Bench, key: str, num_positions: int) -> Contender | str:
    if key == "no-cache" and num_positions > bench.plan.largest_without_cache:
        return f"skipped: more than {bench.plan.largest_without_cache} positions would be computed again at every step"
    try:
        return make_contender(key, *bench.models)
    except Exception as error:
        bench.progress.note(f"{CONTENDERS[key]} failed: {reason(error)}")
        return f"failed: {reason(error)}"


def _decode_cell(
    bench: Bench, heading: str, contenders: dict[str, Contender | str], batch_size: int, context: int, num_rows: int
) -> dict[str, Any]:
    num_tokens = bench.plan.steps(batch_size, context)
    prompt = bench.prompt(context, num_rows)
    running = {name: contender for name, contender in contenders.items() if isinstance(contender, Contender)}
    tasks = {name: _run_of(contender, prompt, batch_size, num_tokens) for name, contender in running.items()}
    rates, graphs = bench.bandwidth.bytes_per_second, dict.fromkeys(running, 0)
    first_rate, num_graphs = len(rates), _num_graphs()
    outcomes = bench.turns().take(
        f"{heading}, batch {batch_size}, context {context}",
        tasks,
        {name: _counting_graphs(task, graphs, name) for name, task in tasks.items()},
        warm_up_again={name for name, contender in running.items() if contender.is_compiled},
        after_round=bench.bandwidth.sample,
    )
    done = [name for name, outcome in outcomes.items() if outcome.error is None]
    reference = REFERENCE if REFERENCE in done else done[0] if done else None
    cell: dict[str, Any] = {
        "batch_size": batch_size,
        "context": context,
        "num_tokens": num_tokens,
        "reference": reference,
        "weight_bytes_per_token": weight_bytes(bench.models[0]),
        "cache_bytes_per_token": _cache_read(bench, batch_size, context + 1 + num_tokens / 2),
        "bytes_per_second": summary(rates[first_rate:]),
        "graphs_compiled_while_timed": _num_graphs() - num_graphs - sum(graphs.values()),
        "contenders": {},
    }
    for name, contender in contenders.items():
        if isinstance(contender, str) or reference is None or name not in done:
            why = contender if isinstance(contender, str) else f"failed: {outcomes[name].error}"
            cell["contenders"][name] = {"error": why}
            continue
        row = cell["contenders"][name] = _row(outcomes[name], outcomes[reference])
        row["first_difference"] = _first_difference(
            bench, prompt.batch(batch_size), outcomes[reference], outcomes[name]
        )
        if contender.arguments.get("use_cache", True):
            num_bytes = cell["weight_bytes_per_token"] + cell["cache_bytes_per_token"]
            row["bytes_per_second"] = num_bytes / row["ms_per_token"]["median"] * 1000
        if contender.is_compiled:
            usual_s = statistics.median(run.stamps_s[-1] for run in outcomes[name].results)
            row["graphs_compiled"], row["compile_s"] = graphs[name], outcomes[name].warm_up_s - usual_s
    return cell


def _run_of(contender: Contender, prompt: Prompt, batch_size: int, num_tokens: int) -> Callable[[], Run]:
    return lambda: decode(contender, prompt, batch_size, num_tokens)


def _num_graphs() -> int:
    """Graphs that this process has compiled so far."""
    return counters["stats"]["unique_graphs"]


def _counting_graphs(task: Callable[[], Run], graphs: dict[str, int], name: str) -> Callable[[], Run]:
    """The task, adding to `graphs[name]` what it compiles."""

    def counted() -> Run:
        before = _num_graphs()
        try:
            return task()
        finally:
            graphs[name] += _num_graphs() - before

    return counted


def _cache_read(bench: Bench, batch_size: int, length: float) -> float:
    shape = SHAPES[bench.plan.shape]
    numbers = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * length
    return batch_size * numbers * bench.dtype.itemsize


def _row(outcome: Outcome[Run], reference: Outcome[Run]) -> dict[str, Any]:
    pairs = zip(reference.results, outcome.results, strict=True)
    last = outcome.results[-1]
    return {
        "ms_per_token": summary([run.ms_per_token for run in outcome.results]),
        "times_as_fast": summary([theirs.ms_per_token / ours.ms_per_token for theirs, ours in pairs]),
        "first_token_ms": summary([1000 * run.stamps_s[0] for run in outcome.results]),
        "cache_bytes": last.cache_bytes,
        "passing_bytes": last.passing_bytes,
    }


def _first_difference(
    bench: Bench, ids: torch.Tensor, reference: Outcome[Run], outcome: Outcome[Run]
) -> dict[str, Any] | None:
    """Where greedy tokens first part, and how far apart Llama without a cache sees the two tokens' logits there."""
    expected = reference.results[0].tokens
    for run in [*outcome.warm_ups, *outcome.results]:
        length = min(expected.shape[1], run.tokens.shape[1])
        differs = (expected[:, :length] != run.tokens[:, :length]).nonzero()
        if len(differs):
            row, step = min(differs.tolist(), key=lambda place: place[1])
            text = torch.cat([ids[row].cpu(), expected[row, :step]])[None].to(bench.device)
            with torch.no_grad():
                logits = bench.models[1](text, use_cache=False, logits_to_keep=1).logits[0, -1].float()
            tokens = int(expected[row, step]), int(run.tokens[row, step])
            gap = float(logits[tokens[0]] - logits[tokens[1]])
            return {"row": row, "step": step, "expected": tokens[0], "got": tokens[1], "logit_gap": gap}
    return None


def prefill_section(bench: Bench) -> dict[str, Any]:
    """Seconds of reading a prompt into an empty cache, as `generate` does it: logits of the last position only.

    A compiled model reads a prompt uncompiled, but with its projections fused.
    """
    plan, cells = bench.plan, []
    models: dict[str, PreTrainedModel] = {"Llama": bench.models[1], "Tercet": bench.models[0]}
    if "tercet-compiled" in plan.contenders:
        compiled = _contender_or_reason(bench, "tercet-compiled", 0)
        if isinstance(compiled, Contender):
            models[compiled.name] = compiled.model

    def task(model: PreTrainedModel, ids: torch.Tensor) -> Callable[[], float]:
        return lambda: timed(lambda: prefill(model, ids), bench.device)

    for batch_size in plan.prefill_batches:
        ids = bench.ids(batch_size, plan.prefill_tokens)
        outcomes = bench.turns().take(
            f"prefill, batch {batch_size}, {plan.prefill_tokens} tokens",
            {name: task(model, ids) for name, model in models.items()},
        )
        cells.append({"batch_size": batch_size, "num_tokens": plan.prefill_tokens, **_seconds(outcomes, "Llama")})
    return {"cells": cells}


@torch.no_grad()
def prefill(model: PreTrainedModel, ids: torch.Tensor, cache: Any = None) -> Any:
    """The filled cache."""
    return model(ids, cache=cache, use_cache=True, logits_to_keep=1).cache


def _seconds(outcomes: dict[str, Outcome[float]], reference: str) -> dict[str, Any]:
    """Durations, and the ratio of each to the reference's in the same round."""
    rows: dict[str, Any] = {}
    for name, outcome in outcomes.items():
        if outcome.error is not None:
            rows[name] = {"error": f"failed: {outcome.error}"}
            continue
        rows[name] = {"seconds": summary(outcome.results)}
        if outcomes[reference].error is None:
            pairs = zip(outcomes[reference].results, outcome.results, strict=True)
            rows[name]["times_as_fast"] = summary([theirs / ours for theirs, ours in pairs])
    return {"contenders": rows}


def uncached_section(bench: Bench) -> dict[str, Any]:
    """Seconds until each of the first tokens after a short prompt is there, with and without a cache."""
    plan, (ours, _) = bench.plan, bench.models
    ids = bench.ids(1, plan.uncached_prompt)

    def run(use_cache: bool, num_tokens: int) -> Callable[[], Run]:
        return lambda: generate(ours, ids, num_tokens, use_cache=use_cache)

    outcomes = bench.turns(plan.uncached_rounds).take(
        f"with and without a cache, {plan.uncached_tokens} tokens",
        {"cached": run(True, plan.uncached_tokens), "uncached": run(False, plan.uncached_tokens)},
        {"cached": run(True, 8), "uncached": run(False, 8)},
    )
    for name, outcome in outcomes.items():
        if outcome.error is not None:
            return {"error": f"{name} failed: {outcome.error}"}
    stamps = {name: zip(*(run.stamps_s for run in outcome.results), strict=True) for name, outcome in outcomes.items()}
    curves = {name: [statistics.median(at_token) for at_token in of_all] for name, of_all in stamps.items()}
    return {
        "prompt_tokens": plan.uncached_prompt,
        "num_rounds": plan.uncached_rounds,
        "seconds_until_token": curves,
        "total_s": {name: summary([run.stamps_s[-1] for run in outcome.results]) for name, outcome in outcomes.items()},
        "first_difference": _first_difference(bench, ids, outcomes["cached"], outcomes["uncached"]),
    }


def quantized_section(bench: Bench) -> dict[str, Any]:
    """ms/token and bytes of quantized caches beside the plain one."""
    ours, cells = bench.models[0], []
    contenders: dict[str, Contender | str] = {"Tercet": Contender("Tercet", ours, tercet_cache(ours))}
    for quantization in ("int8", "int4"):
        name = f"Tercet {quantization}"
        contenders[name] = Contender(name, ours, tercet_cache(ours, quantization=quantization))
    for context in bench.plan.quantized_contexts:
        for batch_size in bench.plan.quantized_batches:
            cell = _decode_cell(bench, "quantized", contenders, batch_size, context, bench.plan.distinct_rows)
            rows = cell["contenders"]
            for row in rows.values():
                row.pop("bytes_per_second", None)  # counted for the plain cache's bytes
                if "cache_bytes" in row and "cache_bytes" in rows["Tercet"]:
                    row["share_of_plain_bytes"] = row["cache_bytes"] / rows["Tercet"]["cache_bytes"]
            cells.append(cell)
    return {"cells": cells}


def fork_section(bench: Bench) -> dict[str, Any]:
    """A prompt for several continuations: forked once it is in a cache, or prefilled again for each; then decoding."""
    plan, ours = bench.plan, bench.models[0]
    prompt, num_rows = bench.prompt(plan.fork_tokens, 1), plan.fork_rows
    ids = prompt.batch(num_rows)
    caches: list[TercetCache] = []

    def prefilled() -> float:
        return timed(lambda: prefill(ours, ids), bench.device)

    def forked(then: Callable[[Any], Any]) -> float:
        cache = prompt.fill(TercetCache(ours.config), 1)
        return timed(lambda: then(cache.fork(num_rows)), bench.device)

    names = "prefill again", f"fork({num_rows})", f"fork({num_rows}) and the first token"
    outcomes = bench.turns(plan.fork_rounds).take(
        f"fork({num_rows}) of {plan.fork_tokens} tokens",
        {
            names[0]: prefilled,
            # Kept until the clock has stopped: freeing is not forking.
            names[1]: lambda: forked(caches.append),
            # Should a fork leave its work to the next update, it is in here.
            names[2]: lambda: forked(lambda cache: prefill(ours, ids[:, -1:], cache)),
        },
        after_round=caches.clear,
    )
    caches.clear()
    contenders: dict[str, Contender | str] = {
        f"batch of {num_rows}": Contender("plain", ours, tercet_cache(ours)),
        f"fork({num_rows})": Contender("fork", ours, forked_cache(ours)),
    }
    cell = _decode_cell(bench, "forked", contenders, num_rows, plan.fork_tokens, 1)
    return {"num_tokens": plan.fork_tokens, "num_rows": num_rows, **_seconds(outcomes, names[0]), "decode": cell}
