"""Three documents on their way into a batch, every number printed: the example of docs/data.md.

python benchmarks/data_example.py
"""

import os
import tempfile
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np

from tercet.tokenizer import token_ids, train_tokenizer
from tercet.training.arrangement import PackingName, arrange
from tercet.training.batches import PackedBatches
from tercet.training.counts import counted
from tercet.training.documents import Document
from tercet.training.packing import PackedDataset, Packing
from tercet.training.shards import prepare
from tercet.training.token_set import TokenSet
from tercet.training.weighted_order import WeightedOrder

TEXTS = ["the cat sat on the mat\n", "the dog\n", "a cat and a dog\n"]
T = 12


def main() -> None:
    """Prepare, pack, read, order."""
    tokenizer = train_tokenizer(TEXTS, vocab_size=266)
    with tempfile.TemporaryDirectory() as folder:
        data = prepare(
            [Document(text, "example") for text in TEXTS], tokenizer, Path(folder), validation_fraction=0.0,
            split_by="document", drop_duplicates=True, progress=False, workers=1,
        ).train  # fmt: skip
        print_documents(data, tokenizer)
        names: tuple[PackingName, ...] = ("best_fit", "concatenate")
        for name in names:
            print_pieces(name, arrange(data, T, packing=name).packing)
        dataset = PackedDataset(data, arrange(data, T).packing, **token_ids(tokenizer).for_rows())
        print_rows(dataset)
        print_order(dataset)
    print_weights()


def print_documents(data: TokenSet, tokenizer: Any) -> None:
    """The stored tokens of each document, as numbers and as text."""
    print("# documents: stored tokens")
    for document, length in enumerate(data.document_lengths.tolist()):
        ids = data.tokens(document, 0, length).tolist()
        words = "|".join(tokenizer.decode([token]).replace("\n", "\\n") for token in ids)
        print(f"{document}  {' '.join(map(str, ids))}\n   {length} tokens: {words}")


def print_pieces(name: str, packing: Packing) -> None:
    """Which pieces of which documents stand in which row."""
    print(f"\n# packing {name}, rows of {T}: (document, start, length)")
    pieces = list(zip(packing.document.tolist(), packing.start.tolist(), packing.length.tolist(), strict=True))
    for row in range(packing.num_rows):
        in_row = pieces[packing.row_offsets[row] : packing.row_offsets[row + 1]]
        free = T - sum(length for _, _, length in in_row)
        print(f"row {row}  " + "  ".join(map(str, in_row)) + (f"  and {free} slots of padding" if free else ""))


def print_rows(dataset: PackedDataset) -> None:
    """The tensors of all rows, and the bounds of a batch of them."""
    print("\n# best_fit, the tensors of each row")
    for row in range(len(dataset)):
        for number, (name, tensor) in enumerate(dataset.row(row).items()):
            label = f"row {row}" if number == 0 else "     "
            print(f"{label}  {name:<13}" + "".join(f"{value:5d}" for value in tensor.tolist()))
    batches = PackedBatches(
        dataset, seed=1, global_batch_size=3, per_device_batch_size=3, rank=0, world_size=1, with_document_bounds=True
    )
    (batch,) = batches.micro_batches(0)
    print(f"\n# the batch of rows {batches.rows(0)[0].tolist()}, bounds of documents for varlen attention")
    print(f"cu_seq_lens_q = cu_seq_lens_k = {batch['cu_seq_lens_q'].tolist()}")
    print(f"max_length_q = max_length_k = {batch['max_length_q']}")


def print_order(dataset: PackedDataset) -> None:
    """The rows of the first steps, on one process and on two."""
    print("\n# rows of steps of 2, seed 1")
    for world_size in (1, 2):
        for rank in range(world_size):
            batches = PackedBatches(
                dataset, seed=1, global_batch_size=2, per_device_batch_size=1, rank=rank, world_size=world_size
            )
            steps = "  ".join(f"step {step}: {batches.rows(step).ravel().tolist()!s:<7}" for step in range(3))
            name = f"{counted(world_size, 'process', 'processes')}, rank {rank}"
            print(f"{name:<19}  {steps}".rstrip())


def print_weights() -> None:
    """Sources of 6, 4 and 3 rows with weights 0.5, 0.3 and 0.2."""
    samples = np.arange(12)
    order = WeightedOrder(1, [0.5, 0.3, 0.2], np.array([0, 6, 10, 13]))
    print("\n# a mixture: sources of rows 0-5, 6-9 and 10-12 with weights 0.5, 0.3 and 0.2, seed 1")
    sources, ordinals = order.places(samples)
    for name, values in (
        ("sample", samples.tolist()),
        ("source", sources.tolist()),
        ("its k-th", ordinals.tolist()),
        ("row", order(samples).tolist()),
    ):
        print(f"{name:<9}" + "".join(f"{value:4d}" for value in values))


if __name__ == "__main__":
    main()
