"""Where a run stands, and how a call of the loop ends."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tercet.training.results import Evaluation


@dataclass(frozen=True)
class RunState:
    """Where a run stands; with the recipe it says what comes next.

    Attributes:
        step: Steps done, those that were left out included.
        tokens_seen: Label tokens that were learned from.
        duration_s: Seconds of training, evaluations and saves left out.
        num_processes: That trained, when this was saved.
        loss_nats: Of the last step whose loss was finite.
        data_fingerprint: Of `PreparedData`: tokenizer, documents and split together.
        tokenizer_hash: Of the tokenizer alone.
        num_bad_steps: Steps left out because their gradient was not finite.
        num_bad_in_row: Those of them that end with this step.
        best_bits_per_byte: Lowest that an evaluation has found, None before the first.
        best_step: The step of that evaluation.
    """

    step: int = 0
    tokens_seen: int = 0
    duration_s: float = 0.0
    num_processes: int = 1
    loss_nats: float = 0.0
    data_fingerprint: str = ""
    tokenizer_hash: str = ""
    num_bad_steps: int = 0
    num_bad_in_row: int = 0
    best_bits_per_byte: float | None = None
    best_step: int | None = None


@dataclass(frozen=True)
class LoopOutcome:
    """How a call of `TrainingLoop.run` ended.

    Attributes:
        state: Where the run stands.
        interrupted_by: What stopped it, a signal's name or the deadline; None if it reached its last step.
        checkpoint: The newest checkpoint.
        loss_nats: Training loss of the last step.
        evaluation: Of the last step, None if the run did not get there or there is nothing to evaluate on.
        tokens_per_second: Over all training time of the run, evaluations and checkpoints left out.
        mfu: FLOPs of the model per second over the device's measured rate for matrix products.
        positions: Of each process in its stream, see `StreamSteps.state_dict`; None where the data was prepared.
        stalled_s: Seconds of this call in which training stood still for checkpoints.
    """

    state: RunState
    interrupted_by: str | None
    checkpoint: Path | None
    loss_nats: float
    evaluation: Evaluation | None
    tokens_per_second: float
    mfu: float
    positions: list[dict[str, Any]] | None = None
    stalled_s: float = 0.0
