"""Which checkpoints stay."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """What a recipe says of keeping checkpoints.

    Attributes:
        keep_last: The newest so many stay.
        keep_every: Those whose step it divides stay, too; None keeps none for that.
        keep_best: The one of the lowest validation bits per byte stays, too.
    """

    keep_last: int
    keep_every: int | None = None
    keep_best: bool = False

    def to_remove(self, steps: Iterable[int], best_step: int | None) -> list[int]:
        """Steps whose checkpoints go, ascending.

        Args:
            steps: Of all checkpoints that are there.
            best_step: Of the best evaluation that the run has seen, None before the first.
        """
        ordered = sorted(steps)
        kept = set(ordered[-self.keep_last :])
        if self.keep_every is not None:
            kept |= {step for step in ordered if step % self.keep_every == 0}
        if self.keep_best and best_step is not None:
            kept.add(best_step)
        return [step for step in ordered if step not in kept]
