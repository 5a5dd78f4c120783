"""Signals that ask a run to stop."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C; what kill, container managers and Slurm's end send; what Slurm sends before the end (`--signal=USR1@120`)."""

_ONCE_S = 1.0


class StopRequest:
    """Number of the signal that has asked the run to stop; 0: none has."""

    received: int = 0
    received_at: float = 0.0


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Turn the stop signals into a request, answered after the step that runs; a second SIGINT acts at once."""
    request = StopRequest()
    previous: dict[int, Any] = {}

    def ask(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if request.received and number == signal.SIGINT:
            # A launcher hands on the Ctrl-C that the terminal has sent to every process already.
            if now - request.received_at < _ONCE_S:
                return
            raise KeyboardInterrupt
        request.received, request.received_at = number, now

    for number in STOP_SIGNALS:
        try:
            previous[number] = signal.signal(number, ask)
        except ValueError:  # not in the main thread, where signals do not arrive anyway
            continue
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
