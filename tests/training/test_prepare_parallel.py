"""Several processes give what one gives, and a preparation that is killed goes on."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tercet.tokenizer import encode_documents
from tercet.training import parallel_encoding
from tercet.training.documents import DataError, Document
from tercet.training.parallel_encoding import PieceEncoder
from tercet.training.pieces import Piece
from tercet.training.shards import PreparedData, prepare

# In a subprocess of the tests: documents come slowly enough to be killed among them.
PROGRAM = """
import sys, time
from transformers import AutoTokenizer
from tercet.training import parallel_encoding, shards
from tercet.training.documents import Document
from pydoc_data import topics
parallel_encoding._JOB_CHARS, parallel_encoding._SMALL_CHARS = 4000, 20000
def slowly():
    for name, text in sorted(topics.topics.items()):
        yield Document(text, "even" if len(text) % 2 == 0 else "odd")
        time.sleep(0.004)
if __name__ == "__main__":
    shards.prepare(slowly(), AutoTokenizer.from_pretrained(sys.argv[1]), sys.argv[2], validation_fraction=0.1,
        split_by="document", drop_duplicates=True, progress=False, tokens_per_shard=8000, workers=int(sys.argv[3]))
"""


@pytest.fixture
def small_jobs(monkeypatch) -> None:
    """Processes start, and the window fills, with little text."""
    monkeypatch.setattr(parallel_encoding, "_JOB_CHARS", 4000)
    monkeypatch.setattr(parallel_encoding, "_SMALL_CHARS", 20_000)


@pytest.fixture
def documents(small_corpus) -> list[Document]:
    return [Document(text, "even" if len(text) % 2 == 0 else "odd") for text in small_corpus]


def prepared(documents, tokenizer, data_dir: Path, **changes) -> PreparedData:
    settings = {"validation_fraction": 0.1, "split_by": "document", "drop_duplicates": True, "tokens_per_shard": 8000}
    return prepare(documents, tokenizer, data_dir, progress=False, **{**settings, **changes})


def files(data_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in data_dir.iterdir()}


@pytest.mark.usefixtures("small_jobs")
@pytest.mark.parametrize("split_by", ["document", "tail"])
def test_the_files_do_not_depend_on_the_number_of_workers(tmp_path: Path, small_tokenizer, documents, split_by: str):
    for workers in (1, 2, 3):
        prepared(documents, small_tokenizer, tmp_path / f"{workers}", workers=workers, split_by=split_by)
    one = files(tmp_path / "1")
    assert len(one) > 10
    assert files(tmp_path / "2") == one
    assert files(tmp_path / "3") == one


@pytest.mark.usefixtures("small_jobs")
def test_ids_are_those_of_the_whole_document(tmp_path: Path, small_tokenizer, documents):
    data = prepared(documents, small_tokenizer, tmp_path, workers=2, validation_fraction=0.0, drop_duplicates=False)
    expected = encode_documents(small_tokenizer, [document.text for document in documents])
    for document, ids in enumerate(expected):
        assert data.train.tokens(document, 0, len(ids)).tolist() == ids


def test_results_come_in_order_and_the_window_bounds_what_is_read_ahead(monkeypatch, small_tokenizer):
    monkeypatch.setattr(parallel_encoding, "_JOB_CHARS", 1000)
    monkeypatch.setattr(parallel_encoding, "_SMALL_CHARS", 0)
    given = taken = most = 0

    def items() -> Iterator[Piece | int]:
        nonlocal given
        for i in range(3000):
            given += 1
            yield Piece(f"Text {i}. " * (1 + 199 * (i % 50 == 0)))
            yield i

    encoder = PieceEncoder(small_tokenizer.backend_tokenizer.to_str(), "uint16", 2)
    numbers = []
    for item, ids in encoder.run(items()):
        if ids is None:
            numbers.append(item)
            taken += 1
            most = max(most, given - taken)
        else:
            assert small_tokenizer.decode(ids) == item.text
    assert numbers == list(range(3000))
    assert most < 1200


def test_the_largest_job_that_waits_is_begun_first(small_tokenizer):
    encoders = parallel_encoding._ProcessEncoders.__new__(parallel_encoding._ProcessEncoders)
    encoders._waiting, encoders._number = parallel_encoding.queue.PriorityQueue(), parallel_encoding.itertools.count()
    for length in (5, 50, 20, 50):
        job = parallel_encoding._Job()
        job.fill(iter([Piece("x" * length)]))
        encoders.submit(job)
    assert [encoders._waiting.get()[0] for _ in range(4)] == [-50, -50, -20, -5]


@pytest.mark.usefixtures("small_jobs")
def test_a_worker_that_is_killed_ends_the_preparation_in_one_line(tmp_path: Path, small_tokenizer, documents):
    def killing() -> Iterator[Document]:
        for i, document in enumerate(documents):
            if i == len(documents) // 2:
                for child in _children(os.getpid()):
                    os.kill(child, signal.SIGKILL)
            yield document

    with pytest.raises(DataError, match=r"killed by SIGKILL.*fewer --workers") as caught:
        prepared(killing(), small_tokenizer, tmp_path / "data", workers=2)
    assert "\n" not in str(caught.value)
    prepared(documents, small_tokenizer, tmp_path / "data", workers=2)
    prepared(documents, small_tokenizer, tmp_path / "whole", workers=1)
    assert files(tmp_path / "whole") == files(tmp_path / "data")


def _children(process: int) -> list[int]:
    """Workers of this process; it may have other children."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            is_worker = b"encode_worker.py" in (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if parent == process and is_worker:
            found.append(int(folder.name))
    return found


@pytest.mark.parametrize(("workers", "kills"), [(1, (2,)), (2, (1, 3, 6))])
def test_killed_again_and_again_it_comes_to_the_same_bytes(
    tmp_path: Path, small_tokenizer, documents, workers: int, kills: tuple[int, ...]
):
    """Each kill comes when so many shards are finished."""
    small_tokenizer.save_pretrained(tmp_path / "tokenizer")
    data_dir = tmp_path / "data"
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "tokenizer"), str(data_dir), str(workers)]
    waits = random.Random(workers)
    for wanted in kills:
        child = subprocess.Popen(command)
        deadline = time.monotonic() + 60
        while len(list(data_dir.glob("shard-*.npz"))) < wanted and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(waits.random() * 0.1)
        workers_of_it = _children(child.pid)
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        with pytest.raises(DataError, match="no finished prepared data"):
            PreparedData.open(data_dir)
        while any(Path(f"/proc/{pid}").exists() for pid in workers_of_it) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not [pid for pid in workers_of_it if Path(f"/proc/{pid}").exists()]
    (data_dir / ".shard-00002.bin.x1.writing").write_bytes(b"half")  # as a kill inside a write leaves it
    kept = {path: path.stat().st_mtime_ns for path in data_dir.glob("shard-*")}
    assert subprocess.run(command).returncode == 0
    prepared(documents, small_tokenizer, tmp_path / "whole")
    assert files(data_dir) == files(tmp_path / "whole")
    assert all(path.stat().st_mtime_ns == made for path, made in kept.items() if path.with_suffix(".npz") in kept)


def test_no_worker_is_started_for_little_text(tmp_path: Path, small_tokenizer, documents, monkeypatch):
    started = []
    start = parallel_encoding._ProcessEncoders
    monkeypatch.setattr(parallel_encoding, "_ProcessEncoders", lambda *of: started.append(of) or start(*of))
    prepared(documents, small_tokenizer, tmp_path, workers=8)
    assert not started


def test_a_number_of_workers_that_is_none_is_refused(tmp_path: Path, small_tokenizer, documents):
    with pytest.raises(ValueError, match="workers must be at least 1"):
        prepared(documents, small_tokenizer, tmp_path, workers=0)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_one_document_of_50_mb_needs_little_more_memory_than_itself(tmp_path: Path, small_tokenizer, workers: int):
    small_tokenizer.save_pretrained(tmp_path / "tokenizer")
    program = """
import resource, sys
from pathlib import Path
from transformers import AutoTokenizer
from pydoc_data import topics
from tercet.training import parallel_encoding
from tercet.training.documents import Document
from tercet.training.shards import prepare
worker_kb = [0]
close = parallel_encoding._ProcessEncoders.close
def measure_and_close(self):  # what the system says of ended children includes the parent that they were forked from
    for process in self._processes:
        status = Path(f"/proc/{process.pid}/status").read_text()
        worker_kb.append(int(status.partition("VmHWM:")[2].split()[0]))
    close(self)
parallel_encoding._ProcessEncoders.close = measure_and_close
text = "\\n".join(text for _, text in sorted(topics.topics.items()))
text = (text * (50_000_000 // len(text) + 1))[:50_000_000]
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
data = prepare([Document(text, "long"), Document("short", "short")], tokenizer, sys.argv[2], validation_fraction=0.0,
    split_by="document", drop_duplicates=True, progress=False, workers=int(sys.argv[3]))
assert data.report.bytes == len(text.encode()) + 5
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, max(worker_kb))
"""
    command = [sys.executable, "-c", program, str(tmp_path / "tokenizer"), str(tmp_path / "data"), str(workers)]
    environment = {**os.environ, "RAYON_NUM_THREADS": "2"}
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    grown_kb, worker_kb = map(int, shown.stdout.split())
    assert grown_kb < 250_000
    assert (worker_kb > 0) == (workers > 1)
    assert worker_kb < 200_000
