"""Training a tokenizer: time, memory and bytes per token, beside feeding `tokenizers` directly.

    python benchmarks/tokenizer.py FILE.jsonl.gz --output DIR

FILE has the columns `text` and `source`. One document in twenty is held out by hash. Each training runs in a process of
its own, turn about, and reads one file of JSON lines; a peak is that of the process's resident memory, Python and
libraries included. Linux only.

A corpus smaller than FILE is a sample by hash of it. A larger one repeats it, and no copy is a duplicate: in each, four
documents in ten have the letters of their words rotated (by one place in the first copy, by two in the second), which
makes the distinct words grow about as they do in natural text, and the others have their lines shuffled.
"""

import argparse
import gzip
import json
import random
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any, get_args

from tokenizer_report import tables

from tercet.tokenizer.pretokenization import BLANKS_PATTERN, BLOOM_PATTERN, CLAUSES_PATTERN, LLAMA3_PATTERN, Words

HELD_OUT = 0.05
MEMORY_LIMIT = 18 << 30  # a direct training that wants more fails, and says so, instead of stopping the machine
LANGUAGES = {
    "gcide": "English", "wordnet_glosses": "English", "jane_austen": "English", "linux_rst": "English",
    "python_rst": "English", "chinese_poetry": "Chinese", "libreoffice_zh_CN": "Chinese",
    "python_stdlib_source": "code", "gnome_help_many_languages": "many languages",
    "handbook_26_languages": "many languages", "udhr_532_languages": "many languages",
}  # fmt: skip

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|{digits}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PATTERNS = {
    "Llama 3 (Tercet's default)": LLAMA3_PATTERN,
    "Llama 3, one digit (Qwen 2)": _LLAMA3.replace("{digits}", r"\p{N}"),
    "Llama 3, any digits": _LLAMA3.replace("{digits}", r"\p{N}+"),
    "GPT-2's": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "o200k (GPT-4o)": (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
        rf"{_CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "BLOOM (words: bloom)": BLOOM_PATTERN,
    "clauses (words: clauses)": CLAUSES_PATTERN,
    "clauses, all marks joined": CLAUSES_PATTERN.split("|[ ")[0] + r"|[ \t\r\n]*[^ \t\r\n\p{N}]+|[ \t\r\n]+",
    "blanks (words: blanks)": BLANKS_PATTERN,
    "blanks, one at most before a word": r"\s?\S+|\s+",
}


def main() -> None:
    """Measure, write JSON and tables, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[8, 80, 800], help="sizes of the corpus")
    parser.add_argument("--rounds", type=int, default=3, help="of each size; one is enough for a large corpus")
    parser.add_argument("--direct-up-to", type=float, default=1e9, metavar="MB", help="no direct training above this")
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--pattern-megabytes", type=float, default=80, help="text for the pre-tokenizations; 0 is none")
    parser.add_argument(
        "--compare", action="append", default=[], metavar="FOLDER", help="tokenizers to measure as well"
    )
    parser.add_argument("--output", type=Path, help="folder for tokenizer.json-like figures and the tables")
    parser.add_argument("--smoke", action="store_true", help="a run of seconds, which says nothing")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(_WORKERS[json.loads(arguments.worker)["do"]](json.loads(arguments.worker))))
        return
    if arguments.file is None:
        parser.error("FILE is missing")
    if arguments.smoke:
        arguments.megabytes, arguments.rounds, arguments.vocab_size = [0.2, 0.6], 1, 1024
        arguments.pattern_megabytes = 0.2
    with tempfile.TemporaryDirectory() as folder:
        record = measure(arguments, Path(folder))
    text = tables(record)
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "tokenizer.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        (arguments.output / "tokenizer.md").write_text(text + "\n")
    print(text)


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All sections, as JSON holds them."""
    import tokenizers

    from tercet.training.hardware import processor_name, usable_cores

    held_out = folder / "held-out.jsonl"
    training, order = [], random.Random(0)
    say("reading")
    split_file(arguments.file, held_out, folder / "train.jsonl")
    sections: dict[str, Any] = {"training": training}
    for megabytes in arguments.megabytes:
        corpus = write_corpus(folder / "train.jsonl", folder / f"{megabytes:g}.jsonl", megabytes)
        kinds = ["tercet"] + (["direct"] if megabytes <= arguments.direct_up_to else [])
        rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
        for turn in range(arguments.rounds):
            for kind in order.sample(kinds, len(kinds)):
                say(f"{megabytes:g} MB, round {turn + 1}, {kind}")
                saved = str(folder / f"{kind}-{megabytes:g}")
                rows[kind].append(work(do=kind, corpus=str(corpus), vocab_size=arguments.vocab_size, save=saved))
        folders = {kind: str(folder / f"{kind}-{megabytes:g}") for kind in kinds if "error" not in rows[kind][-1]}
        scores = _must(work(do="score", tokenizers=folders, held_out=str(held_out)))
        training.append({"megabytes": megabytes, "runs": rows, "bytes_per_token": scores["bytes_per_token"]})
        corpus.unlink()
    if arguments.pattern_megabytes:
        sections["patterns"] = measure_patterns(arguments, folder, held_out)
    return {
        "command": shlex.join(["python", "benchmarks/tokenizer.py", *(Path(word).name for word in sys.argv[1:])]),
        "date": date.today().isoformat(),
        "processor": processor_name(),
        "cores": usable_cores(),
        "tokenizers": tokenizers.__version__,
        "vocab_size": arguments.vocab_size,
        "sections": sections,
    }  # fmt: skip


def measure_patterns(arguments: argparse.Namespace, folder: Path, held_out: Path) -> dict[str, Any]:
    """Bytes per token on held-out text of tokenizers that differ in their pattern alone, and of others."""
    corpus = write_corpus(folder / "train.jsonl", folder / "patterns.jsonl", arguments.pattern_megabytes)
    folders = {}
    for number, (name, pattern) in enumerate(PATTERNS.items()):
        say(f"pattern {name}")
        save = str(folder / f"pattern-{number}")
        _must(work(do="pattern", corpus=str(corpus), vocab_size=arguments.vocab_size, save=save, pattern=pattern))
        folders[name] = save
    for words in get_args(Words):  # what is left of a pattern's text where memory is bounded
        say(f"words {words}")
        folders[f"within the budget, `--words {words}`"] = save = str(folder / f"words-{words}")
        _must(work(do="tercet", corpus=str(corpus), vocab_size=arguments.vocab_size, save=save, words=words))
    others = {Path(path).name: path for path in arguments.compare}
    scores = _must(work(do="score", tokenizers=folders | others, held_out=str(held_out)))
    return {"megabytes": arguments.pattern_megabytes, "patterns": list(PATTERNS), **scores}


def split_file(file: Path, held_out: Path, train: Path) -> None:
    """Documents by hash into what is trained on and what is held out."""
    from tercet.training.split import is_validation

    open_text = gzip.open if file.suffix == ".gz" else open
    with open_text(file, "rt") as lines, held_out.open("w") as out, train.open("w") as rest:
        for line in lines:
            (out if is_validation(json.loads(line)["text"], HELD_OUT) else rest).write(line)


def write_corpus(train: Path, corpus: Path, megabytes: float) -> Path:
    """A sample by hash of the training text, or copies of it; see the top."""
    total = sum(len(json.loads(line)["text"].encode()) for line in train.open())
    wanted, written = megabytes * 1e6, 0
    share = min(1.0, wanted / total)
    with corpus.open("w") as out:
        for copy in range(max(1, round(wanted / total))):
            generator = random.Random(copy)
            for number, line in enumerate(train.open()):
                if zlib.crc32(line.encode()) > share * 2**32:
                    continue
                text = json.loads(line)["text"]
                if copy:
                    text = _varied(text, copy, rotate=number % 10 < 4, generator=generator)
                out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                written += len(text.encode())
    say(f"{written / 1e6:.1f} MB written")
    return corpus


def _varied(text: str, copy: int, *, rotate: bool, generator: random.Random) -> str:
    if rotate:
        return _WORD.sub(lambda match: match[0][copy % len(match[0]) :] + match[0][: copy % len(match[0])], text)
    lines = text.split("\n")
    generator.shuffle(lines)
    return f"{copy} " + "\n".join(lines)


_WORD = re.compile(r"[^\W\d_]+")


def work(**task: Any) -> dict[str, Any]:
    """Do a task in a process of its own; what stopped it is under "error"."""
    command = [sys.executable, __file__, "--worker", json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"ended by signal {-done.returncode}"])[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1])


def _must(result: dict[str, Any]) -> dict[str, Any]:
    if "error" in result:
        raise SystemExit(f"a part failed: {result['error']}")
    return result


def train_tercet(task: dict[str, Any]) -> dict[str, Any]:
    """`train_tokenizer` as it comes."""
    from tercet.tokenizer import SampleCounts, train_tokenizer

    counts: list[SampleCounts] = []
    with _Measured() as measured:
        tokenizer = train_tokenizer(
            _texts(task["corpus"]), task["vocab_size"], words=task.get("words", "llama3"), on_text_used=counts.append
        )
    tokenizer.save_pretrained(task["save"])
    return measured.result | {"seen_bytes": counts[0].seen_bytes, "used_bytes": counts[0].kept_bytes}


def train_directly(task: dict[str, Any]) -> dict[str, Any]:
    """`tokenizers` with the same pre-tokenizer and trainer settings, fed with the documents."""
    import tercet.tokenizer  # noqa: F401 - the same libraries in memory
    from tercet.tokenizer.pretokenization import word_splitter

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    with _Measured() as measured:
        backend = _train(word_splitter(), task)
    _save(backend, task["save"])
    return measured.result


def train_pattern(task: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer of another pattern. While pairs are counted, words are cut at 256 characters, as in Tercet's."""
    from tokenizers import Regex, pre_tokenizers

    def splitter(*patterns: str) -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    with _Measured() as measured:
        backend = _train(splitter(task["pattern"], "(?m:.{1,256})"), task)
    backend.pre_tokenizer = splitter(task["pattern"])
    _save(backend, task["save"])
    return measured.result


def score(task: dict[str, Any]) -> dict[str, Any]:
    """Bytes per token by language of tokenizer folders, in the order given."""
    from transformers import AutoTokenizer

    from tercet.tokenizer import ReportText, make_report

    tokenizers = {name: AutoTokenizer.from_pretrained(path) for name, path in task["tokenizers"].items()}
    with ReportText() as text, Path(task["held_out"]).open() as lines:
        for line in lines:
            row = json.loads(line)
            source = str(row["source"])
            text.add(row["text"], LANGUAGES.get(source, source))
        report = make_report(tokenizers, text, held_out=True)
    sources = {**report.sources, "all": report.total}
    return {
        "vocab_sizes": report.tokenizers,
        "bytes": {name: figures.num_bytes for name, figures in sources.items()},
        "bytes_per_token": {
            name: {source: figures.bytes_per_token(name) for source, figures in sources.items()} for name in tokenizers
        },
    }


_WORKERS = {"tercet": train_tercet, "direct": train_directly, "pattern": train_pattern, "score": score}


class _Measured:
    """Seconds, and the process's own peak of resident memory."""

    result: dict[str, Any]

    def __enter__(self) -> "_Measured":
        # A child starts with its parent's high-water mark (and getrusage keeps it); 5 resets the one in /proc.
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _status_bytes("VmRSS")
        self._started = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        seconds = time.perf_counter() - self._started
        self.result = {"seconds": seconds, "peak_bytes": _status_bytes("VmHWM"), "before_bytes": self._before}


def _train(splitter: Any, task: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    from tercet.tokenizer import SPECIAL_TOKENS

    backend = Tokenizer(models.BPE(ignore_merges=True))
    backend.pre_tokenizer = splitter
    trainer = trainers.BpeTrainer(
        vocab_size=task["vocab_size"], min_frequency=2, max_token_length=33, special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(_texts(task["corpus"]), trainer)
    return backend


def _save(backend: Any, folder: str) -> None:
    from tokenizers import decoders
    from transformers import PreTrainedTokenizerFast

    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>").save_pretrained(folder)


def _texts(corpus: str) -> Iterator[str]:
    with Path(corpus).open() as lines:
        for line in lines:
            yield json.loads(line)["text"]


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def say(line: str) -> None:
    """Progress, on stderr."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
