"""Requests to the Hub that are made again where that can help, and errors in one line where it cannot.

huggingface_hub makes its own uploads again, and nothing else: neither the commit, nor the creation of a repository, nor
any look at it. It also waits without end for a server that has gone silent.
"""

import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx2
from huggingface_hub import constants, set_client_factory
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RevisionNotFoundError
from huggingface_hub.utils._http import default_client_factory

from tercet.hub.options import PushOptions
from tercet.training.errors import UserError

T = TypeVar("T")
Say = Callable[[str], None]

_CONFLICT = 409
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
_MAX_RETRIES = 5
_LONGEST_WAIT_S = 16.0
_LONGEST_ASKED_WAIT_S = 300.0
_TIMEOUT = httpx2.Timeout(120.0, connect=15.0)
# What huggingface_hub has made again itself, five times, when its error arrives.
_MADE_AGAIN = re.compile(r"^/api/\w+/[^/]+/[^/]+/(preupload|xet-write-token)/|\.git/info/lfs/")
_GET_TOKEN = "`hf auth login` keeps one, or set HF_TOKEN; https://huggingface.co/settings/tokens makes them"


class MovedError(UserError):
    """Someone else has changed the branch in the meantime."""


def use_bounded_waits() -> None:
    """Let no request of this process wait forever for a Hub that does not answer."""

    def make() -> httpx2.Client:
        client = default_client_factory()
        client.timeout = _TIMEOUT
        return client

    set_client_factory(make)


class Patience:
    """Makes requests again that failed for a reason that passes, waiting longer each time, or as long as asked for.

    Args:
        say: Gets a line for each wait.
        max_retries: Of one request.
        first_wait_s: Doubles from wait to wait.
    """

    def __init__(self, say: Say, *, max_retries: int = _MAX_RETRIES, first_wait_s: float = 1.0) -> None:
        self._say, self._max_retries, self._first_wait_s = say, max_retries, first_wait_s

    def call(self, what: str, request: Callable[[], T]) -> T:
        """The request's result.

        Args:
            what: Is being done, for the line about a wait.

        Raises:
            Exception: The request's last one.
        """
        for number in range(self._max_retries + 1):
            try:
                return request()
            except Exception as error:
                if not self.waits(what, error, number):
                    raise
        raise AssertionError("the last round returns or raises")

    def waits(self, what: str, error: Exception, number: int, *, conflicts_pass: bool = False) -> bool:
        """Wait before a request is made again; False if that would not help, or has been tried often enough.

        Args:
            number: Of waits before this one.
            conflicts_pass: Status 409 is a reason that passes, too.
        """
        passes = is_transient(error) or (conflicts_pass and status_of(error) == _CONFLICT)
        if number >= self._max_retries or not passes or _was_made_again(error):
            return False
        asked = asked_wait_s(error)
        if asked is not None and asked > _LONGEST_ASKED_WAIT_S:
            return False
        # Many clients that fail at once must not come back at once.
        own = min(self._first_wait_s * 2**number, _LONGEST_WAIT_S) * random.uniform(0.8, 1.2)
        wait_s = max(own, asked) if asked is not None else own
        self._say(f"  {what}: {_reason(error)}; again in {wait_s:.0f} s ({number + 1} of {self._max_retries})")
        time.sleep(wait_s)
        return True


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later: no connection, a busy or broken server."""
    error = _root(error)
    if isinstance(error, HfHubHTTPError):
        return status_of(error) in _TRANSIENT
    return isinstance(error, httpx2.TransportError)


def status_of(error: BaseException) -> int | None:
    """The HTTP status behind an error, if there is one."""
    error = _root(error)
    return error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else None


def asked_wait_s(error: BaseException) -> float | None:
    """Seconds that the server asks to wait, as a number or as a date."""
    error = _root(error)
    if not isinstance(error, HfHubHTTPError) or error.response is None:
        return None
    value = error.response.headers.get("retry-after", "").strip()
    if value.isdigit():
        return float(value)
    try:
        return max((parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds(), 0.0)
    except (ValueError, TypeError):
        return None


def _was_made_again(error: BaseException) -> bool:
    error = _root(error)
    try:
        request: Any = error.response.request if isinstance(error, HfHubHTTPError) else getattr(error, "request", None)
    except RuntimeError:  # httpx2's own where the error belongs to no request
        return False
    if request is None:
        return False
    return request.method == "PUT" or _MADE_AGAIN.search(request.url.path) is not None


def _root(error: BaseException) -> BaseException:
    """huggingface_hub wraps what went wrong with a file."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _reason(error: BaseException) -> str:
    error = _root(error)
    if (status := status_of(error)) is not None:
        return f"the Hub answers {status}"
    if isinstance(error, httpx2.TimeoutException):
        return "the Hub does not answer"
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def one_line_errors(options: PushOptions, *, endpoint: str, changed: str = "nothing was changed") -> Iterator[None]:
    """Turn whatever a request raises into one line with a remedy.

    Args:
        endpoint: The Hub's address.
        changed: What is true of the repository in spite of the error.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        message = _explain(_root(error), options, endpoint, changed)
        if message is None:
            raise
        raise UserError(message) from error


def _explain(error: BaseException, options: PushOptions, endpoint: str, changed: str) -> str | None:
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, so nothing can be sent: unset it"
    if isinstance(error, HfHubHTTPError):
        return _explain_status(error, options, changed)
    if isinstance(error, httpx2.TransportError):
        return (
            f"the Hub at {endpoint} cannot be reached ({_reason(error)}); {changed}: {options.again} when the network "
            "is there"
        )
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'} cannot be read ({error.strerror or error}); {changed}"
    if isinstance(error, ValueError | RuntimeError):
        return f"the Hub did not take it ({' '.join(str(error).split())[:300]}); {changed}"
    return None


def _explain_status(error: HfHubHTTPError, options: PushOptions, changed: str) -> str:
    status, theirs, repo_id = status_of(error), _message_of(error), options.repo_id
    if status == 401:
        return (
            f"the Hub does not know this token{theirs}; {changed}: get a new one ({_GET_TOKEN}); HF_TOKEN goes before "
            "what `hf auth login` keeps"
        )
    if status == 403:
        return (
            f"this token may not write to {repo_id}{theirs}; {changed}: use a token with the role 'write', of an owner "
            "or member of its namespace"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{repo_id} has no such revision{theirs}; {changed}: look at its branches on the Hub"
    if status == 404:
        return f"{repo_id} is not there, or this token may not see it{theirs}; {changed}: check the name"
    if status in (409, 412):
        return f"{repo_id} does not take this now{theirs}; {changed}: {options.again} when nothing else changes it"
    if status == 413:
        return f"the Hub finds this too large{theirs}; {changed}"
    if status == 429:
        wait = asked_wait_s(error)
        when = "later" if wait is None else f"in {wait:.0f} s"
        return f"the Hub asks for fewer requests{theirs}; {changed}: {options.again} {when}"
    if status is not None and status >= 500:
        return f"the Hub is out of order (status {status}){theirs}; {changed}: {options.again} later"
    return f"the Hub refuses this with status {status}{theirs}; {changed}"


def _message_of(error: HfHubHTTPError) -> str:
    text = " ".join((error.server_message or "").split())[:300]
    return f" ({text})" if text else ""


def check_online(token: str | None) -> str:
    """The token, where anything can be sent at all.

    Raises:
        UserError: There is none, or huggingface_hub has been told to stay offline.
    """
    if constants.is_offline_mode():
        raise UserError("HF_HUB_OFFLINE is set, so nothing can be sent: unset it")
    if not token:
        where = "HF_TOKEN is empty" if os.environ.get("HF_TOKEN") == "" else "there is no token for the Hub"
        raise UserError(f"{where}, so nothing can be sent: {_GET_TOKEN} (role 'write')")
    return token


@contextmanager
def told_waits(say: Say) -> Iterator[None]:
    """Tell of huggingface_hub's own waits by `say`; its log would show signed addresses."""

    class Teller(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            message = record.getMessage()
            if message.startswith(("Retrying in", "Rate limited")):
                say(f"  the Hub, or the way to it, fails: {message[0].lower()}{message[1:].rstrip('.')}")

    logger = logging.getLogger("huggingface_hub.utils._http")
    teller, propagates = Teller(), logger.propagate
    logger.addHandler(teller)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(teller)
        logger.propagate = propagates
