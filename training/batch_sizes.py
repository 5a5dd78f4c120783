"""Which samples a step consumes when the global batch grows in stages: a pure function of the step's number.

Early in training the gradient of few rows says nearly as much as that of many (arXiv:1812.06162), so a run may begin
with small global batches and reach the same loss with fewer tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class BatchSizes:
    """Rows of the global batch at every step.

    Attributes:
        final: Rows from the last stage's end on.
        stages: (until_step, rows) of each stage of the warm-up: `rows` in the steps before `until_step` that no stage
            before holds.

    Raises:
        ValueError: A size below 1, or stages whose ends do not ascend.
    """

    final: int
    stages: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        sizes = [self.final, *(size for _, size in self.stages)]
        if min(sizes) < 1:
            raise ValueError(f"global_batch_size must be at least 1, not {min(sizes)}.")
        ends = [0, *(until for until, _ in self.stages)]
        if any(after <= before for before, after in pairwise(ends)):
            raise ValueError(f"until_step of the stages must ascend from 1, not {ends[1:]}.")

    def at(self, step: int) -> int:
        """Rows of the step that follows `step` finished ones."""
        return next((size for until, size in self.stages if step < until), self.final)

    def before(self, step: int) -> int:
        """Rows of all steps before this one."""
        total = begin = 0
        for until, size in self.stages:
            total += (min(until, step) - begin) * size
            begin = min(until, step)
        return total + (step - begin) * self.final

    def __iter__(self) -> Iterator[int]:
        """Each size once per stage, in the order of the run."""
        yield from (size for _, size in self.stages)
        yield self.final
