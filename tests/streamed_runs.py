"""A stream of local shards, recipes that train on it, and what its processes hand to training."""

import json
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

from tercet.training.pipeline import make_model
from tercet.training.recipe_batches import streamed_batches
from tercet.training.split import is_validation
from tercet.training.stream_order import shard_order
from tercet.training.stream_preparation import begin_stream

FRACTION = 0.2


def write_shards(folder: Path, texts: list[str], num_shards: int) -> Path:
    """JSON lines, dealt to shards in turn; the first shard has what the last ones lack."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(num_shards):
        rows = (json.dumps({"text": text}) + "\n" for text in texts[shard::num_shards])
        (folder / f"{shard:02d}.jsonl").write_text("".join(rows))
    return folder


def distinct_texts(corpus: list[str], num_texts: int = 150, num_chars: int = 200) -> list[str]:
    """Documents of about so many characters, each with a number of its own."""
    book = " ".join(corpus)
    return [f"Document {i}. {book[i * num_chars : (i + 1) * num_chars]}" for i in range(num_texts)]


def trained_texts(texts: list[str]) -> list[str]:
    """Those that no hash holds out."""
    return [text for text in texts if not is_validation(text, FRACTION)]


def texts_of_a_rank(folder: Path, rank: int, world_size: int, epoch: int, seed: int = 3) -> list[str]:
    """What a process is to train on in an epoch, in its order: whole files, or every so many rows of all of them."""
    files = [[json.loads(line)["text"] for line in path.open()] for path in sorted(folder.glob("*.jsonl"))]
    order = shard_order(seed, epoch, str(folder), len(files))
    if len(files) >= world_size:
        return trained_texts([text for file in order[rank::world_size] for text in files[file]])
    rows = [(file, row) for file in order for row in range(len(files[file]))]
    return trained_texts([files[file][row] for file, row in rows if (file + row) % world_size == rank])


def begin(recipe, folder: Path):
    """The tokenizer and the stream of a recipe; what one process of `world_size` is handed is `batches_of`."""
    folder.mkdir(exist_ok=True)
    return begin_stream(recipe, folder, lambda line: None)


def batches_of(recipe, tokenizer, stream, rank: int, world_size: int):
    """The batches that a run gives to its training loop in this process."""
    process = SimpleNamespace(process_index=rank, num_processes=world_size)
    return streamed_batches(recipe, stream, make_model(recipe, tokenizer), tokenizer, process)


def documents_of(batches, num_steps: int, eos_token_id: int) -> list[list[tuple[int, bool]]]:
    """Whole documents in the order in which they came: (token, whether it is a label) without their ends."""
    documents: list[list[tuple[int, bool]]] = [[]]
    inputs, labels = [], []
    for micro_batches in islice(batches.steps(0, num_steps), num_steps):
        for batch in micro_batches:
            inputs += batch["input_ids"].flatten().tolist()
            labels += batch["shift_labels"].flatten().tolist()
    # The label of a position is the input of the next, unless it is masked.
    for token, label in zip(inputs[1:], labels[:-1], strict=True):
        if token == eos_token_id:
            documents.append([])
        else:
            documents[-1].append((token, label == token))
    return documents[:-1]
