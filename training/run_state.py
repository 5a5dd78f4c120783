"""Where a run stands."""

from dataclasses import dataclass


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
