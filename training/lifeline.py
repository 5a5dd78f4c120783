"""Whether the other processes of a run are alive; when one is not, the rest stop within a minute and say why.

A collective waits for a process that is gone until the process group's timeout, which is long. So each process holds a
socket to process 0. The system closes the socket of a process that dies, however it dies, and probes find a machine
that is gone within half a minute; neither asks anything of the process itself, which may be busy for hours.
"""

import contextlib
import os
import secrets
import selectors
import socket
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator

from tercet.training.errors import UserError

# From the news until the process ends: time to fail by itself, with the better message, or to end a step and save.
_GRACE_S = 3.0
_CONNECT_S = 10.0
# A machine that is gone is noticed after 15 s of silence and three probes, 5 s apart.
_PROBES = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
_DIED = "has died: it was killed, ran out of memory, or its machine is gone"
_REMEDY = "the newest checkpoint is kept, and the same command goes on from it"

# A forked child (a worker that tokenizes) would hold its parent's sockets open beyond the parent's death.
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [held.close() for held in _sockets])


class LostProcessError(UserError):
    """Another process of the run has stopped, and this one cannot go on without it."""


class Lifeline:
    """One end of the line; with one process, it does nothing."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._news: str | None = None
        self._changed = threading.Condition()
        self._is_main_ready = False
        self._has_left = False

    def wait_for_main(self) -> None:
        """Wait, however long it takes, until process 0 has called `main_is_ready`.

        Raises:
            LostProcessError: A process has stopped in the meantime.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_main_ready or self._news is not None)
            if self._news is not None and not self._is_main_ready:
                raise LostProcessError(self._describe())

    def main_is_ready(self) -> None:
        """Process 0 has done what the others wait for."""
        self._is_main_ready = True

    def leave(self, failure: str | None) -> None:
        """Say goodbye, or why this process fails; from now on, news of others does not end it."""
        with self._changed:
            self._has_left = True
            self._changed.notify_all()

    def news_within(self, seconds: float) -> str | None:
        """What has stopped the run, waiting for the news if need be; None if there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._news is not None, seconds)
            return self._describe() if self._news is not None else None

    def _describe(self) -> str:
        return f"{self._news}; process {self.rank} stops with it; {_REMEDY}"

    def _hear(self, news: str) -> None:
        """Take the first news, and end this process unless it ends by itself."""
        with self._changed:
            if self._news is not None or self._has_left:
                return
            self._news = news
            self._changed.notify_all()
            if self._changed.wait_for(lambda: self._has_left, _GRACE_S):
                return
        # The main thread waits in a collective for a process that is gone: nothing less ends it.
        print(f"tercet: {self._describe()}", file=sys.stderr, flush=True)
        os._exit(2)


class _Watcher(Lifeline):
    """Process 0's end: hears from every other process and tells all of them."""

    def __init__(self, listener: socket.socket, token: str) -> None:
        super().__init__(rank=0)
        self.token, self.port = token, listener.getsockname()[1]
        self._lines: dict[socket.socket, int] = {}  # who is at the other end
        self._pending: dict[socket.socket, bytes] = {}
        self._num_here = 0
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ)
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def begin(self, num_others: int) -> None:
        """Wait until all others have left the collectives that brought them here, then let them go on."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_here == num_others or self._news is not None)
            self._tell("begin")

    def main_is_ready(self) -> None:
        with self._changed:
            self._is_main_ready = True
            self._tell("ready")

    def leave(self, failure: str | None) -> None:
        with self._changed:
            self._tell("bye" if failure is None else f"news process 0 stopped: {failure}")
        super().leave(failure)

    def _tell(self, line: str) -> None:
        for connection in list(self._lines):
            with contextlib.suppress(OSError):  # one who has gone meanwhile needs no telling
                connection.sendall(f"{line}\n".encode())

    def _watch(self) -> None:
        while not self._has_left:
            for key, _ in self._selector.select(timeout=1.0):
                if key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    _prepare(connection)
                    self._pending[connection] = b""
                    self._selector.register(connection, selectors.EVENT_READ)
                else:
                    self._read(key.fileobj)  # type: ignore[arg-type]

    def _read(self, connection: socket.socket) -> None:
        try:
            received = connection.recv(4096)
        except OSError:
            received = b""
        *lines, self._pending[connection] = (self._pending[connection] + received).split(b"\n")
        for line in lines:
            if connection in self._pending:  # what comes behind a last word is not read
                self._take(connection, line.decode(errors="replace"))
        if not received and connection in self._pending:
            rank = self._lines.get(connection)
            self._forget(connection)
            if rank is not None:
                self._lost(f"process {rank} {_DIED}")

    def _take(self, connection: socket.socket, line: str) -> None:
        word, _, rest = line.partition(" ")
        rank = self._lines.get(connection)
        if rank is None:
            token, _, number = rest.partition(" ")
            if word != "hello" or not secrets.compare_digest(token, self.token) or not number.isdigit():
                self._forget(connection)  # some other program's
                return
            with self._changed:
                self._lines[connection] = int(number)
        elif word == "here":
            with self._changed:
                self._num_here += 1
                self._changed.notify_all()
        elif word == "stopped":
            self._forget(connection)
            self._lost(f"process {rank} stopped: {rest}")
        elif word == "bye":
            self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._lines.pop(connection, None)
        self._pending.pop(connection, None)
        connection.close()

    def _lost(self, news: str) -> None:
        with self._changed:
            self._tell(f"news {news}")
        self._hear(news)


class _Watched(Lifeline):
    """Another process's end."""

    def __init__(self, rank: int, connection: socket.socket, token: str) -> None:
        super().__init__(rank)
        self._connection = connection
        self._has_begun = False
        connection.sendall(f"hello {token} {rank}\n".encode())
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def begin(self) -> None:
        """Say that this process has left the collectives that brought it here, and wait for the others to."""
        with contextlib.suppress(OSError):
            self._connection.sendall(b"here\n")
        with self._changed:
            self._changed.wait_for(lambda: self._has_begun or self._news is not None)

    def leave(self, failure: str | None) -> None:
        super().leave(failure)
        with contextlib.suppress(OSError):
            self._connection.sendall(b"bye\n" if failure is None else f"stopped {failure}\n".encode())

    def _watch(self) -> None:
        with contextlib.suppress(OSError), self._connection.makefile("r", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                word, _, rest = line.strip().partition(" ")
                if word in ("begin", "ready"):
                    with self._changed:
                        self._has_begun = True
                        self._is_main_ready = word == "ready"
                        self._changed.notify_all()
                elif word == "news":
                    self._hear(rest)
                    return
                elif word == "bye":
                    with self._changed:
                        self._is_main_ready = True
                        self._changed.notify_all()
                    return
        self._hear(f"process 0 {_DIED}")


@contextmanager
def lifeline(accelerator: Accelerator) -> Iterator[Lifeline]:
    """Hold the line to the other processes inside; all processes enter and leave it.

    An error inside is told to the others, which stop. Where a collective fails because another process has stopped,
    that is the error.

    Raises:
        LostProcessError: Another process has stopped.
    """
    line = _connect(accelerator)
    try:
        yield line
    except BaseException as error:
        # A collective that broke off has its reason in another process; the news of it may be on its way.
        is_consequence = isinstance(error, RuntimeError) and accelerator.num_processes > 1
        news = line.news_within(_GRACE_S) if is_consequence else None
        reason = " ".join(str(error).split())[:500]
        line.leave(reason if isinstance(error, UserError) else f"{type(error).__name__}: {reason}".rstrip(": "))
        if news is not None:
            raise LostProcessError(news) from error
        raise
    line.leave(None)


def _connect(accelerator: Accelerator) -> Lifeline:
    if accelerator.num_processes == 1:
        return Lifeline(rank=0)
    rank, size = accelerator.process_index, accelerator.num_processes
    is_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == str(size)
    watcher: _Watcher | None = None
    address: Any = None
    if rank == 0:
        watcher = _Watcher(_listen(is_one_machine), secrets.token_hex(16))
        address = (_names_of_this_machine(is_one_machine), watcher.port, watcher.token)
    told: list[Any] = [address]
    dist.broadcast_object_list(told)
    names, port, token = told[0]
    watched = None if watcher is not None else _reach(rank, names, port, token)
    # Together, so that none goes on without the rest.
    answers = ["" for _ in range(int(size))]
    dist.all_gather_object(answers, "" if watcher or watched else f"process {rank} on {socket.gethostname()}")
    if unreached := [answer for answer in answers if answer]:
        raise UserError(
            f"{', '.join(unreached)} cannot reach process 0 at {' or '.join(names)}, port {port}: "
            "open the ports above 1024 between the machines of the run"
        )
    # A process that fails from here on must not tear a collective that others are still in.
    if watcher is not None:
        watcher.begin(size - 1)
        return watcher
    assert watched is not None
    watched.begin()
    return watched


def _reach(rank: int, names: list[str], port: int, token: str) -> _Watched | None:
    for name in names:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((name, port), timeout=_CONNECT_S)
            connection.settimeout(None)
            _prepare(connection)
            return _Watched(rank, connection, token)
    return None


def _listen(is_one_machine: bool) -> socket.socket:
    if is_one_machine:
        return socket.create_server(("127.0.0.1", 0))
    with contextlib.suppress(OSError):  # a system may know IPv6 and have no address of it
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _names_of_this_machine(is_one_machine: bool) -> list[str]:
    if is_one_machine:
        return ["127.0.0.1"]
    names = [socket.gethostname(), socket.getfqdn()]
    # The address that this machine has where it is asked for by the others, which its own name may not resolve to.
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", ""), 9))  # a datagram socket sends nothing by connecting
        names.insert(0, probe.getsockname()[0])
    return list(dict.fromkeys(names))


def _prepare(connection: socket.socket) -> None:
    """Let the system find out when the machine at the other end is gone, and children not hold on to this one."""
    _sockets.add(connection)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES:
        if hasattr(socket, name):  # macOS names the first of them otherwise and has its default of two hours
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
