"""Token ids of a stream of text, made by several processes, in the order of the stream.

Pieces are gathered into jobs. Of the jobs within a window the largest is begun first, so that the work ends evenly;
what comes out is in order, and the same whatever the number of processes. A document of 50 MB is many pieces, and of
those only the window's are in memory beside the document itself.

Each process keeps the ids of the chunks it has met (`tercet.tokenizer.chunking`), which most text is made of; the ids
are those that the tokenizer gives the whole text.
"""

import itertools
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer

from tercet.tokenizer.chunking import chunking_of
from tercet.training import encode_worker
from tercet.training.documents import DataError
from tercet.training.pieces import Piece

_JOB_CHARS = 1 << 18
_JOB_ITEMS = 1 << 14
_JOBS_PER_WORKER = 4
_WINDOW_CHARS = 1 << 26  # reached only by long texts of a tokenizer whose text must not be cut
_SMALL_CHARS = 1 << 20  # less than this is encoded sooner than a worker starts


class _Job:
    """Items that are next to each other in the stream, and the ids of the pieces among them when they are there."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.num_chars = 0
        self.future: Future[tuple[np.ndarray, np.ndarray]] = Future()

    def fill(self, source: Iterator[Any]) -> bool:
        """Take items until the job is full; whether the source still had one."""
        items = self.items
        for item in source:
            items.append(item)
            if type(item) is Piece:
                self.num_chars += len(item[0])
                if self.num_chars >= _JOB_CHARS:
                    return True
            if len(items) >= _JOB_ITEMS:
                return True
        return False

    def request(self) -> tuple[list[str], list[bool]]:
        pieces = [item for item in self.items if type(item) is Piece]
        return [piece[0] for piece in pieces], [piece[1] for piece in pieces]

    def results(self) -> Iterator[tuple[Any, np.ndarray | None]]:
        ids, counts = self.future.result()
        stop = 0
        lengths = iter(counts.tolist())
        for item in self.items:
            if type(item) is Piece:
                start, stop = stop, stop + next(lengths)
                yield item, ids[start:stop]
            else:
                yield item, None


class PieceEncoder:
    """Encodes pieces with `workers` processes; with one, or while there is little text, by a thread of this process.

    Threads would not do: looking up chunks holds the one lock of one interpreter.
    """

    def __init__(self, state: str, dtype: str, workers: int) -> None:
        """
        Args:
            state: What `Tokenizer.to_str()` gives.
            dtype: Of the ids.
            workers: Processes beside this one.

        Raises:
            ValueError: If workers < 1.
        """
        if workers < 1:
            raise ValueError(f"workers must be at least 1, not {workers}.")
        self._state, self._dtype, self._workers = state, dtype, workers

    def run(self, items: Iterable[Any]) -> Iterator[tuple[Any, np.ndarray | None]]:
        """The items in their order, each piece with its ids; anything else passes as it is, with None.

        Items are read as far ahead as the window is wide. If reading them fails, what was read before is given out
        first.

        Raises:
            DataError: If a worker dies, which the operating system's lack of memory does to it.
        """
        staff = _Staff(self._state, self._dtype, self._workers)
        jobs: deque[_Job] = deque()
        try:
            yield from self._run(items, jobs, staff)
        finally:
            staff.close()

    def _run(self, items: Iterable[Any], jobs: deque[_Job], staff: "_Staff") -> Iterator[tuple[Any, np.ndarray | None]]:
        failure: BaseException | None = None
        num_chars, goes_on = 0, True
        source = iter(items)
        while goes_on:
            job = _Job()
            try:
                goes_on = job.fill(source)
            except BaseException as error:  # also Ctrl-C: what is in the window is whole, and worth keeping
                failure, goes_on = error, False
            if job.items:
                staff.submit(job)
                jobs.append(job)
                num_chars += job.num_chars
            while jobs and (
                len(jobs) > _JOBS_PER_WORKER * self._workers
                or num_chars > _WINDOW_CHARS
                or jobs[0].future.done()
                or not goes_on
            ):
                done = jobs.popleft()
                num_chars -= done.num_chars
                yield from done.results()
        if failure is not None:
            raise failure


class _Encoders(Protocol):
    def submit(self, job: _Job) -> None: ...

    def close(self) -> None: ...


class _Staff:
    """Who encodes: a thread at first, processes once there is text enough for them."""

    def __init__(self, state: str, dtype: str, workers: int) -> None:
        chunking = chunking_of(Tokenizer.from_str(state))
        # The chunking as a plain tuple: a worker does not know Tercet's classes.
        plain = None if chunking is None else (chunking.pattern, chunking.prefixes, chunking.word)
        self._arguments = (state, dtype, plain)
        self._workers = workers
        self._num_chars = 0
        self._thread = _ThreadEncoder(*self._arguments)
        self._processes: _ProcessEncoders | None = None

    def submit(self, job: _Job) -> None:
        self._num_chars += job.num_chars
        if self._workers > 1 and self._processes is None and self._num_chars > _SMALL_CHARS:
            self._processes = _ProcessEncoders(self._arguments, self._workers)
        encoders: _Encoders = self._processes or self._thread
        encoders.submit(job)

    def close(self) -> None:
        self._thread.close()
        if self._processes is not None:
            self._processes.close()


class _ThreadEncoder:
    """This process: one thread beside the one that reads, and those that `tokenizers` starts."""

    def __init__(self, state: str, dtype: str, chunking: tuple[str, str, str] | None) -> None:
        self._encoder = encode_worker.Encoder(state, dtype, chunking)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tercet-encoder")

    def submit(self, job: _Job) -> None:
        self._executor.submit(self._encode, job)

    def _encode(self, job: _Job) -> None:
        try:
            job.future.set_result(encode_worker.encode_pieces(self._encoder, *job.request()))
        except BaseException as error:
            job.future.set_exception(error)

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)


class _ProcessEncoders:
    """Worker processes, each with a thread here that hands it one job after another, the largest waiting first."""

    def __init__(self, encoder_arguments: tuple[Any, ...], workers: int) -> None:
        self._waiting: queue.PriorityQueue[tuple[int, int, _Job | None]] = queue.PriorityQueue()
        self._number = itertools.count()
        self._closed = False
        first = pickle.dumps(encoder_arguments, protocol=pickle.HIGHEST_PROTOCOL)
        self._processes = [self._start() for _ in range(workers)]
        self._threads = [
            threading.Thread(target=self._serve, args=(process, first), name="tercet-encoder", daemon=True)
            for process in self._processes
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: _Job) -> None:
        self._waiting.put((-job.num_chars, next(self._number), job))

    def close(self) -> None:
        self._closed = True
        for process in self._processes:
            process.kill()  # holds nothing that could be half-done
        for _ in self._threads:
            self._waiting.put((-sys.maxsize, next(self._number), None))
        for thread in self._threads:
            thread.join()
        for process in self._processes:
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with suppress(OSError):  # the other end is gone, and something may be unwritten
                        stream.close()

    @staticmethod
    def _start() -> "subprocess.Popen[bytes]":
        # -P: the files beside the worker's own must not pass for libraries of the same names.
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        environment |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
        return subprocess.Popen(
            [sys.executable, "-P", encode_worker.__file__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
        )  # fmt: skip

    def _serve(self, process: "subprocess.Popen[bytes]", first: bytes) -> None:
        assert process.stdin is not None and process.stdout is not None
        message = first
        while (job := self._waiting.get()[2]) is not None:
            try:
                process.stdin.write(message + pickle.dumps(job.request(), protocol=pickle.HIGHEST_PROTOCOL))
                process.stdin.flush()
                answer = pickle.load(process.stdout)
            except (EOFError, OSError, pickle.UnpicklingError):
                job.future.set_exception(self._death(process))
                return
            message = b""
            if isinstance(answer, str):
                job.future.set_exception(RuntimeError(f"tokenizing failed in a worker: {answer}"))
            else:
                job.future.set_result(answer)

    def _death(self, process: "subprocess.Popen[bytes]") -> Exception:
        code = process.wait() if not self._closed else 0
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"gone with exit code {code}"
        return DataError(
            f"A process that tokenizes was {how}, for want of memory if nobody stopped it. Run the same command again, "
            f"with fewer --workers; it goes on after the shards that are finished."
        )
