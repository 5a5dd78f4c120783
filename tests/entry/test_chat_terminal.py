"""`tercet chat` at a terminal: the line that is typed, and Ctrl-C while it is."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from tercet.chat import _CtrlC


def count_interrupts(ctrl_c: _CtrlC) -> int:
    """Of two signals at a prompt, the second right behind the first."""
    count = 0
    with suppress(KeyboardInterrupt), ctrl_c.interrupting():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            count += 1
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                count += 1
    return count


def test_a_second_ctrl_c_right_behind_the_first_is_swallowed():
    """As programs send it that pass signals on, which the terminal has sent, too: Python would break on it."""
    with _CtrlC() as ctrl_c:
        assert [count_interrupts(ctrl_c) for _ in range(2)] == [1, 1]


@pytest.mark.slow
def test_typed_lines_come_back_and_ctrl_c_leaves_only_the_line(checkpoint):
    pytest.importorskip("readline", reason="this Python edits no lines")
    screen, terminal = pty.openpty()
    words = ["chat", str(checkpoint), "--temperature", "0", "--max-new-tokens", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tercet", *words], stdin=terminal, stdout=terminal, stderr=subprocess.PIPE, text=True
    )
    os.close(terminal)
    shown = b""

    def wait_for(text: bytes, start: int, seconds: float = 60) -> None:
        nonlocal shown
        until = time.monotonic() + seconds
        while text not in shown[start:]:
            assert process.poll() is None, shown
            if time.monotonic() > until:
                raise TimeoutError(shown)
            if select.select([screen], [], [], 0.1)[0]:
                shown += os.read(screen, 4096)

    try:
        wait_for(b"> ", 0)
        for typed, answer in (
            (b"once upon\n", b"> "),
            (b"\x1b[A", b"once upon"),
            (b"\n", b"> "),
            (b"half a line", b"a line"),
        ):
            start = len(shown)
            os.write(screen, typed)
            wait_for(answer, start)
        start = len(shown)
        while b"> " not in shown[start:]:
            for _ in range(2):
                process.send_signal(signal.SIGINT)
            # Python's wait for a key misses signals that come between its last look for some and the wait itself.
            with suppress(TimeoutError):
                wait_for(b"> ", start, seconds=5)
        os.write(screen, b"/quit\n")
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
        os.close(screen)
    assert process.returncode == 0, told
    assert "/quit or Ctrl-D leaves" in told
    assert "Traceback" not in told
