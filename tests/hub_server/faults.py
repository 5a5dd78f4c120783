"""What goes wrong on demand, and a record of every request."""

import re
import threading
from dataclasses import dataclass


@dataclass
class Fault:
    """What happens to the requests that match; see `Faults.add`."""

    match: re.Pattern[str]
    status: int | None
    message: str
    code: str | None
    retry_after: int | None
    cut: int | None
    slow: float
    lose_reply: bool
    times: int
    after: int


class Faults:
    """The faults that are still to happen, in the order in which they were added."""

    def __init__(self) -> None:
        self._waiting: list[Fault] = []
        self._lock = threading.Lock()

    def add(
        self,
        match: str = "",
        *,
        status: int | None = None,
        message: str = "a fault that the test asked for",
        code: str | None = None,
        retry_after: int | None = None,
        cut: int | None = None,
        slow: float = 0.0,
        lose_reply: bool = False,
        times: int = 1,
        after: int = 0,
    ) -> None:
        """Let requests go wrong.

        Args:
            match: Regular expression, searched in "METHOD /path?query" as it came, percent signs included.
            status: Answer with this status and do nothing else.
            message: X-Error-Message that goes with the status.
            code: X-Error-Code that goes with the status.
            retry_after: Seconds, as the header Retry-After of the status.
            cut: Bytes of the body after which the connection is cut: of what comes with PUT and POST, else of what is
                sent.
            slow: Seconds to wait first.
            lose_reply: Do what is asked, then cut the connection instead of answering.
            times: How many requests it happens to.
            after: How many matching requests are spared before.
        """
        with self._lock:
            fault = Fault(re.compile(match), status, message, code, retry_after, cut, slow, lose_reply, times, after)
            self._waiting.append(fault)

    def clear(self) -> None:
        """Let nothing more go wrong."""
        with self._lock:
            self._waiting.clear()

    @property
    def are_over(self) -> bool:
        """Whether every fault has happened as often as it was to."""
        with self._lock:
            return not self._waiting

    def take(self, line: str) -> Fault | None:
        """The fault of this request: the first that matches."""
        with self._lock:
            for fault in self._waiting:
                if not fault.match.search(line):
                    continue
                if fault.after > 0:
                    fault.after -= 1
                    continue
                fault.times -= 1
                if fault.times == 0:
                    self._waiting.remove(fault)
                return fault
        return None


@dataclass
class RequestRecord:
    """One request, as it came and as it was answered.

    Attributes:
        method: HTTP method.
        path: Path and query as they came.
        user: Whose token came with it; None without one.
        range: The header Range.
        user_agent: The header User-Agent.
        status: What was answered; None if the connection was cut before.
        received_bytes: Bytes of the request's body that were read.
        sent_bytes: Bytes of the answer's body that were sent.
        is_known: Whether the Hub has such an address at all.
    """

    method: str
    path: str
    user: str | None = None
    range: str | None = None
    user_agent: str = ""
    status: int | None = None
    received_bytes: int = 0
    sent_bytes: int = 0
    is_known: bool = True

    @property
    def line(self) -> str:
        return f"{self.method} {self.path}"
