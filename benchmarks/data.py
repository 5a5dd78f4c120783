"""Text to batches: Tercet beside `datasets.map` + `group_texts`, with one tokenizer, in one interleaved run.

    python benchmarks/data.py ../shared/data/mixed-80MB.jsonl.gz --output DIR      # a JSONL file with a column `text`
    python benchmarks/data.py --smoke                                              # Python's own documentation, seconds

**Preparation.** Every run is a process of its own that starts from the text and an empty folder and ends with rows of
tokens; contenders take turns, in an order drawn anew each round. The peer does what transformers' example of causal
language model training does: `load_dataset`, `map(tokenize)`, `map(group_texts)`, the latter two in as many processes
as Tercet gets. Speed is tokens that the tokenizer made, by seconds from the text to the rows; a second figure leaves
the peer's reading of the text into Arrow out, and Tercet's reading not. The memory of every process of a run is read
from /proc ten times a second; what counts is the largest process of a run. Pages of files that are mapped, which
the system can take back, are in it.

**Resume.** A new process opens the prepared data, packs it and makes the first batch, at step 0 and where 90 % of an
epoch is done.

**Loader.** Tokens per second of `PackedBatches.steps`, rows as the demo has them, against what the demo's training
consumes, measured here in a short run of its recipe.
"""

import argparse
import contextlib
import gzip
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

from data_report import draw, summary, tables
from tokenizers import Tokenizer

from tercet.tokenizer import train_tokenizer
from tercet.training.corpus import python_documentation
from tercet.training.hardware import describe_hardware, versions
from tercet.training.sources import Source, read_documents

HERE = Path(__file__).resolve().parent
CONTENDERS = ("tercet", "group_texts")


def main() -> None:
    """Measure, print tables, write the record and the picture."""
    arguments = read_arguments()
    with tempfile.TemporaryDirectory(prefix="tercet-data-", dir=arguments.scratch) as scratch:
        record = measure(arguments, Path(scratch))
    print(tables(record))


def save(record: dict[str, Any], folder: Path | None) -> None:
    """What there is so far: a run that is stopped has not measured for nothing."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "data.md").write_text(tables(record) + "\n")
    draw(record, folder / "data.png")


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, nargs="?", help="JSONL, also compressed; default: Python's documentation")
    parser.add_argument("--sizes", type=float, nargs="+", default=[8, 80], help="MB of text to prepare (default: 8 80)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--vocab-size", type=int, default=32_768)
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer folder; default: trained on part of the text")
    parser.add_argument("--sequence-length", type=int, default=1024)
    parser.add_argument("--demo-steps", type=int, default=100, help="steps of the demo that are timed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scratch", type=Path, help="where the temporary folder goes")
    parser.add_argument("--output", type=Path, help="a folder for data.json, data.md and data.png")
    parser.add_argument("--smoke", action="store_true", help="sizes of seconds: does it run?")
    arguments = parser.parse_args()
    if arguments.corpus is None and not arguments.smoke:
        parser.error("give a JSONL file, or --smoke")
    if arguments.smoke:
        arguments.sizes, arguments.rounds, arguments.vocab_size = [0.1, 0.2], 1, 400
        arguments.sequence_length, arguments.demo_steps = 64, 2
    return arguments


def measure(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """All sections."""
    corpora = {size: write_corpus(arguments.corpus, size, scratch / f"corpus-{size:g}.jsonl.gz")
               for size in arguments.sizes}  # fmt: skip
    tokenizer = arguments.tokenizer or make_tokenizer(max(corpora.items())[1]["path"], arguments.vocab_size, scratch)
    os.environ["RAYON_NUM_THREADS"] = str(arguments.processes)  # threads of a tokenizer that is alone in its process
    record: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "date": str(date.today()),
        "hardware": describe_hardware(num_processes=arguments.processes).model_dump(),
        "versions": versions().model_dump(),
        "sequence_length": arguments.sequence_length,
        "processes": arguments.processes,
        "vocab_size": Tokenizer.from_file(str(tokenizer / "tokenizer.json")).get_vocab_size(),
        "preparation": [],
    }
    rng = random.Random(arguments.seed)
    prepared = scratch / "prepared"
    for size, corpus in corpora.items():
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
        for number in range(arguments.rounds):
            for name in rng.sample(CONTENDERS, len(CONTENDERS)):
                note(f"{size:g} MB, round {number + 1} of {arguments.rounds}: {name}")
                with tempfile.TemporaryDirectory(dir=scratch) as folder:
                    runs[name].append(prepare_once(name, corpus["path"], tokenizer, Path(folder), arguments))
                    if name == "tercet":
                        Path(folder, "data").rename(scratch / f"prepared-{size:g}-{number}")
                        prepared = scratch / f"prepared-{size:g}-{number}"
        record["preparation"].append({"megabytes": size, "documents": corpus["documents"], "runs": runs})
        save(record, arguments.output)
    note("resume")
    record["resume"] = measure_resume(prepared, arguments)
    save(record, arguments.output)
    note("loader and demo")
    record["loader"] = measure_loader(prepared, scratch, arguments)
    save(record, arguments.output)
    return record


def write_corpus(source: Path | None, megabytes: float, path: Path) -> dict[str, Any]:
    """About so many MB of UTF-8 text, taken evenly from all of the source, as gzipped JSONL."""
    total = sum(len(text.encode("utf-8")) for text in texts(source))
    share = min(1.0, megabytes * 1e6 / total)
    documents = 0
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=1) as file:
        for number, text in enumerate(texts(source)):
            if int((number + 1) * share) > int(number * share):
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                documents += 1
    return {"path": path, "documents": documents}


def texts(source: Path | None) -> Iterator[str]:
    """The text of each row, or the documents of Python's documentation."""
    documents = python_documentation() if source is None else read_documents(Source(path=str(source)))
    return (document.text for document in documents)


def make_tokenizer(corpus: Path, vocab_size: int, scratch: Path) -> Path:
    """Trained on every fourth document: how good it is does not matter here, that all use it does."""
    note(f"training a tokenizer of {vocab_size} tokens")
    train_tokenizer(islice(texts(corpus), 0, None, 4), vocab_size).save_pretrained(scratch / "tokenizer")
    return scratch / "tokenizer"


def prepare_once(
    name: str, corpus: Path, tokenizer: Path, folder: Path, arguments: argparse.Namespace
) -> dict[str, Any]:
    """One contender in a process of its own: what it says, and the most memory that one of its processes held."""
    (folder / "data").mkdir()
    command = [sys.executable, str(HERE / "data_contenders.py"), name, str(corpus), str(tokenizer),
               str(folder / "data"), "--sequence-length", str(arguments.sequence_length),
               "--processes", str(arguments.processes)]  # fmt: skip
    # Nothing of an earlier run may be found again.
    environment = {**os.environ, "HF_DATASETS_CACHE": str(folder / "cache"), "TMPDIR": str(folder)}
    with (folder / "out").open("w+") as out, (folder / "error").open("w+") as error:
        process = subprocess.Popen(command, stdout=out, stderr=error, env=environment)
        peaks = watch_memory(process)
        out.seek(0)
        error.seek(0)
        if process.returncode:
            raise SystemExit(f"{name} failed:\n{error.read()[-2000:]}")
        measured = json.loads(out.read().splitlines()[-1])
    return {**measured, "peak_bytes": max(peaks.values()), "num_processes": len(peaks)}


def watch_memory(process: subprocess.Popen[bytes]) -> dict[int, int]:
    """Until it ends: the high-water mark of resident memory of each process that it consists of, in bytes, by id."""
    peaks: dict[int, int] = {}
    while process.poll() is None:
        for pid in family(process.pid):
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue  # it has ended since
            marks = [line for line in status.splitlines() if line.startswith("VmHWM")]
            if marks:
                peaks[pid] = max(peaks.get(pid, 0), int(marks[0].split()[1]) * 1024)
        time.sleep(0.1)
    return peaks


def family(pid: int) -> list[int]:
    """A process and all that it has started, at any depth."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])  # a name in brackets may hold anything
        except OSError:
            continue
        children.setdefault(parent, []).append(int(path.parent.name))
    found = [pid]
    for member in found:
        found += children.get(member, [])
    return found


def measure_resume(prepared: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds from a new process's open to its first batch, at the start of an epoch and after 90 % of it."""
    seconds: dict[str, list[float]] = {"0 %": [], "90 %": []}
    parts: list[dict[str, float]] = []
    for _ in range(max(5 * arguments.rounds, 3)):
        # In an order drawn anew, or whatever comes second would have warmer caches each time.
        for name, fraction in random.sample([("0 %", 0.0), ("90 %", 0.9)], 2):
            code = _FIRST_BATCH.format(folder=str(prepared), length=arguments.sequence_length, fraction=fraction)
            shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            part = json.loads(shown.stdout.splitlines()[-1])
            parts.append(part)
            seconds[name].append(sum(part[key] for key in ("open", "pack", "batch")))
    return {"seconds": {name: summary(values) for name, values in seconds.items()}, "parts": parts[-1]}


_FIRST_BATCH = """
import json, time
from pathlib import Path
from tercet.training.arrangement import arrange
from tercet.training.batches import PackedBatches
from tercet.training.packing import PackedDataset
from tercet.training.token_set import PreparedData
times = [time.perf_counter()]
data = PreparedData.open(Path({folder!r}))
times.append(time.perf_counter())
packing = arrange(data.train, {length}).packing
times.append(time.perf_counter())
batches = PackedBatches(
    PackedDataset(data.train, packing, eos_token_id=0, pad_token_id=1),
    seed=1, global_batch_size=16, per_device_batch_size=16, rank=0, world_size=1,
)
next(batches.steps(int({fraction} * packing.num_rows / 16), 10**9))
times.append(time.perf_counter())
names = ("open", "pack", "batch")
print(json.dumps({{**dict(zip(names, (b - a for a, b in zip(times, times[1:])))), "num_rows": packing.num_rows}}))
"""


def measure_loader(prepared: Path, scratch: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second that batches hand out, and that the demo trains on; padding of both ways to pack."""
    from tercet.training.arrangement import arrange
    from tercet.training.batches import PackedBatches
    from tercet.training.packing import PackedDataset
    from tercet.training.pipeline import train
    from tercet.training.recipe import load_recipe
    from tercet.training.token_set import PreparedData

    quick = [f"training.num_steps={arguments.demo_steps}", "samples.prompts=[]"]
    recipe = load_recipe("demo", [*quick, *(["tokenizer.vocab_size=400"] if arguments.smoke else [])])
    with contextlib.redirect_stdout(sys.stderr):  # its progress is no part of the tables
        outcome = train(recipe, output_dir=scratch / "demo", say=note)
    if outcome.loop is None or outcome.loop.interrupted_by:
        raise SystemExit("the run of the demo was stopped before its end: its speed says nothing")
    data, training = PreparedData.open(prepared), recipe.training
    speeds: dict[str, Any] = {}
    for length in (training.sequence_length, arguments.sequence_length):
        packing = arrange(data.train, length).packing
        batches = PackedBatches(
            PackedDataset(data.train, packing, eos_token_id=0, pad_token_id=1), seed=1, rank=0, world_size=1,
            global_batch_size=training.global_batch_size, per_device_batch_size=training.per_device_batch_size,
        )  # fmt: skip
        values = []
        for number in range(max(2 * arguments.rounds, 3)):
            num_tokens, started = 0, time.perf_counter()
            for step in batches.steps(number * 200, number * 200 + (20 if arguments.smoke else 200)):
                num_tokens += sum(batch["input_ids"].numel() for batch in step)
            values.append(num_tokens / (time.perf_counter() - started))
        speeds[str(length)] = summary(values)
    padding = {
        name: {str(T): arrange(data.train, T, packing=name).packing.padding_fraction for T in (128, 1024, 4096)
               if data.train.num_tokens >= T}
        for name in ("best_fit", "concatenate")
    }  # fmt: skip
    return {
        "tokens_per_second": speeds,
        "demo_tokens_per_second": outcome.loop.tokens_per_second,
        "padding_fraction": padding,
    }


def note(line: str) -> None:
    """What is being done, on standard error."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
