"""When to end so that the last checkpoint is on the disk before the time is over."""

import time
from collections.abc import Callable


class Deadline:
    """The end of a run's time, and what has to happen before it.

    After each step it asks: would one more, the longest that was seen, and a save, the longest that was seen, still
    be done in time?

    Args:
        started: When the time began, by `clock`.
        seconds: How long it lasts; None: for ever.
        save_s: How long a save may take before one has been seen, a guess.
        clock: Seconds; monotonic.
    """

    def __init__(
        self, started: float, seconds: float | None, save_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._end = None if seconds is None else started + seconds
        self._save_s, self._clock = save_s, clock
        self._first_step_s = self._longest_step_s = 0.0
        self._num_steps = 0
        self._last = clock()

    def step_done(self) -> None:
        """A step, with whatever evaluation, sample and log came behind it, has ended."""
        now = self._clock()
        if self._num_steps == 0:
            # Compilation and first touches of memory come once; they say nothing of the next step.
            self._first_step_s = now - self._last
        else:
            self._longest_step_s = max(self._longest_step_s, now - self._last)
        self._num_steps += 1
        self._last = now

    def save_done(self, seconds: float) -> None:
        """A save took so long, from the loop's stop to the last byte on the disk."""
        self._save_s = max(self._save_s, seconds)

    def is_near(self, *, saves: int = 1) -> bool:
        """Whether there is no time for another step.

        Args:
            saves: How many must end before the run can: one, and the one that is being written.
        """
        if self._end is None:
            return False
        step_s = self._longest_step_s if self._num_steps > 1 else self._first_step_s
        return self._clock() + step_s + saves * self._save_s >= self._end
