"""How long a step takes here: a few real ones, of the recipe's own model and shape, on random tokens."""

import statistics
import time
from dataclasses import dataclass
from typing import Any, cast

import torch

from tercet.modeling import TercetConfig
from tercet.training.acceleration import compile_model
from tercet.training.accounting import flops_per_token
from tercet.training.hardware import measure_matmul_flops
from tercet.training.memory import make_step_model
from tercet.training.optimizers import optimizers_of_recipe
from tercet.training.recipe import Recipe

_LEAST_TIMED, _MOST_TIMED, _TIMED_S = 3, 20, 3.0
"""Steps after the one that warms up: so many at least and at most, and between these as many as fit in the seconds."""
_EVEN = 1.25
_STEADY = 1.5
"""Above these ratios, of the median step to the fastest and of two measured matrix rates, an estimate is rough."""
_MAX_MICRO_BATCH_S = 5.0
"""Of a micro-batch that is timed; one that would take longer is timed with fewer rows."""
_USUAL_MFU = 0.5


@dataclass(frozen=True)
class StepTiming:
    """What a step of the global batch takes on this machine's device.

    Attributes:
        step_s: Seconds, by the fastest: what else runs on the machine only ever makes a step slower. The accumulated
            micro-batches of one process and one update.
        median_s: The same by medians.
        rows: Rows of the micro-batch that was timed; fewer than the recipe's where those would take too long.
        num_timed: Micro-batches and updates timed.
        matmul_rates: FLOP/s of matrix products here, measured before and after.
    """

    step_s: float
    median_s: float
    rows: int
    num_timed: int
    matmul_rates: tuple[float, float]

    @property
    def matmul_flops(self) -> float:
        """FLOP/s of matrix products, the better of the two."""
        return max(self.matmul_rates)

    def unevenness(self) -> str:
        """Why the estimate is rough; empty where it is not."""
        slow, fast = min(self.matmul_rates), max(self.matmul_rates)
        found = []
        if self.median_s > _EVEN * self.step_s:
            found.append(f"the median step took {self.median_s / self.step_s:.1f} times as long as the fastest")
        if fast > _STEADY * slow:
            found.append(f"matrix products ran at {slow / 1e9:,.0f} and at {fast / 1e9:,.0f} GFLOP/s")
        return " and ".join(found)


def time_step(
    recipe: Recipe, config: TercetConfig, device: torch.device, *, num_processes: int = 1, bfloat16: bool = False
) -> StepTiming:
    """Time forward and backward passes and updates.

    Args:
        config: Of the model; random weights, a moment after the start, take as long as trained ones.
        num_processes: Among which the rows of a step are divided, each as fast as this one.
        bfloat16: Autocast.
    """
    training = recipe.training
    if training.num_threads is not None:
        torch.set_num_threads(training.num_threads)
    rate = measure_matmul_flops(device)
    row_s = training.sequence_length * flops_per_token(config, training.sequence_length, training=True)
    row_s /= rate * _USUAL_MFU
    rows = max(1, min(training.per_device_batch_size, int(_MAX_MICRO_BATCH_S / row_s)))
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        passes, updates = _time(recipe, config, device, rows, bfloat16=bfloat16)
    num_micro_batches = training.global_batch_size / num_processes / rows
    fastest, median = (middle(passes) * num_micro_batches + middle(updates) for middle in (min, statistics.median))
    return StepTiming(fastest, median, rows, len(passes), (rate, measure_matmul_flops(device)))


def _time(
    recipe: Recipe, config: TercetConfig, device: torch.device, rows: int, *, bfloat16: bool
) -> tuple[list[float], list[float]]:
    """Seconds of forward and backward of micro-batches, and of the updates after them."""
    training = recipe.training
    model = make_step_model(recipe, config)
    cast(Any, model).to(device)
    optimizers = optimizers_of_recipe(recipe.optimizer, model)
    compiled = compile_model(model, lambda line: None) if training.compile else model
    ids = torch.randint(config.vocab_size, (rows, training.sequence_length), device=device)
    # Two documents a row, as packed rows hold several: their attention is not that of one.
    positions = torch.arange(training.sequence_length, device=device) % max(training.sequence_length // 2, 1)
    batch = {"input_ids": ids, "shift_labels": ids, "position_ids": positions.expand_as(ids)}
    passes, updates = [], []
    while len(passes) <= _LEAST_TIMED or (len(passes) <= _MOST_TIMED and sum(passes[1:] + updates[1:]) < _TIMED_S):
        started = _now(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
            loss = compiled(**batch, num_items_in_batch=ids.numel(), skip_logits=True, use_cache=False).loss
        loss.backward()
        passed = _now(device)
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.optimizer.clip_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        passes.append(passed - started)
        updates.append(_now(device) - passed)
    return passes[1:], updates[1:]  # the first one warms up


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
