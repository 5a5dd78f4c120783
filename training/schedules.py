"""Learning rate over a run, as a multiple of its peak.

Functions of (done, total) alone, in any unit: steps in the training loop, seconds where a run is bounded by time.
"""

import math
from typing import Literal

ScheduleName = Literal["cosine", "warmup_stable_decay", "constant"]


def learning_rate_factor(
    done: float,
    total: float,
    *,
    schedule: ScheduleName,
    warmup: float = 0.0,
    decay_fraction: float = 0.6,
    decay: float | None = None,
    final_fraction: float = 0.0,
) -> float:
    """Multiple of the peak learning rate for the step that follows `done`.

    Args:
        done: Steps (or seconds) finished; 0 before the first.
        total: Steps (or seconds) in the run.
        schedule: `cosine` (arXiv:1608.03983), `warmup_stable_decay` (linear decay over the last `decay_fraction`,
            arXiv:2404.06395) or `constant`; each after a linear warm-up.
        warmup: Steps (or seconds) of linear warm-up.
        decay_fraction: Share of the run that `warmup_stable_decay` decays over.
        decay: The same as a number of steps (or seconds), instead of `decay_fraction`.
        final_fraction: What is left of the peak at the end.

    Returns:
        A number above 0 and at most 1, or 0 from the end on where `final_fraction` is 0.

    Raises:
        ValueError: An unknown schedule.
    """
    if done < warmup:
        return (done + 1) / (warmup + 1)
    if schedule == "constant":
        return 1.0
    if schedule == "cosine":
        progress = min((done - warmup) / max(total - warmup, 1e-9), 1.0)
        return final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * progress))
    if schedule == "warmup_stable_decay":
        length = max(decay_fraction * total if decay is None else decay, 1e-9)
        left = min(max((total - done) / length, 0.0), 1.0)
        return final_fraction + (1 - final_fraction) * left
    raise ValueError(f"schedule is {schedule!r}: choose cosine, warmup_stable_decay or constant")
