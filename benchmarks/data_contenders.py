"""One preparation, alone in its process: text in, rows of tokens out. `data.py` starts it and watches its memory.

    python benchmarks/data_contenders.py tercet CORPUS.jsonl TOKENIZER OUTPUT --sequence-length 1024 --processes 2

The last line on standard output is a JSON object. The clock starts when the libraries are imported and the tokenizer is
loaded, and stops when rows can be read.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"


def with_tercet(corpus: Path, tokenizer: Any, output: Path, sequence_length: int, num_processes: int) -> dict[str, Any]:
    """`prepare`, then best-fit packing: what `tercet data prepare` and the start of a run do."""
    from tercet.training.arrangement import arrange
    from tercet.training.shards import prepare
    from tercet.training.sources import Source, read_documents

    started = time.perf_counter()
    data = prepare(
        read_documents(Source(path=str(corpus))), tokenizer, output, validation_fraction=0.0, split_by="document",
        drop_duplicates=False, progress=False, workers=num_processes,
    )  # fmt: skip
    tokenized = time.perf_counter()
    packing = arrange(data.train, sequence_length).packing
    finished = time.perf_counter()
    return {
        "seconds": {"read and tokenize": tokenized - started, "pack": finished - tokenized},
        "num_tokens": data.train.num_tokens,
        "num_rows": packing.num_rows,
        "num_dropped": data.train.num_tokens - packing.num_tokens,
    }


def with_group_texts(
    corpus: Path, tokenizer: Any, output: Path, sequence_length: int, num_processes: int
) -> dict[str, Any]:
    """`load_dataset`, `map(tokenize)`, `map(group_texts)`: the steps of transformers' example of causal training."""
    import datasets

    datasets.disable_progress_bars()

    def tokenize(batch: dict[str, list[str]]) -> dict[str, Any]:
        return dict(tokenizer(batch["text"]))

    def group_texts(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {name: list(chain(*lists)) for name, lists in batch.items()}
        whole = len(joined["input_ids"]) // sequence_length * sequence_length  # what is left of a batch is dropped
        rows = {
            name: [ids[at : at + sequence_length] for at in range(0, whole, sequence_length)]
            for name, ids in joined.items()
        }
        return {**rows, "labels": rows["input_ids"].copy()}

    workers = num_processes if num_processes > 1 else None
    started = time.perf_counter()
    files, cache = {"train": str(corpus)}, str(output / "cache")
    raw: Any = datasets.load_dataset("json", data_files=files, split="train", cache_dir=cache)
    loaded = time.perf_counter()
    tokens = raw.map(tokenize, batched=True, num_proc=workers, remove_columns=raw.column_names)
    tokenized = time.perf_counter()
    rows = tokens.map(group_texts, batched=True, num_proc=workers)
    finished = time.perf_counter()
    num_tokens = sum(len(ids) for batch in tokens.select_columns("input_ids").iter(1000) for ids in batch["input_ids"])
    return {
        "seconds": {
            "read": loaded - started, "tokenize": tokenized - loaded, "group_texts": finished - tokenized,
        },
        "num_tokens": num_tokens,
        "num_rows": len(rows),
        "num_dropped": num_tokens - len(rows) * sequence_length,
    }  # fmt: skip


CONTENDERS: dict[str, Callable[..., dict[str, Any]]] = {"tercet": with_tercet, "group_texts": with_group_texts}


def main() -> None:
    """Prepare once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contender", choices=list(CONTENDERS))
    parser.add_argument("corpus", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--sequence-length", type=int, default=1024)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    measured = CONTENDERS[arguments.contender](
        arguments.corpus, tokenizer, arguments.output, arguments.sequence_length, arguments.processes
    )
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
