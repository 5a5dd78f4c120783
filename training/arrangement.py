"""The rows that a recipe trains on, and their order: over all documents, or by source where sources have weights.

Shapes: T sequence_length, S sources.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tercet.training.batches import Order
from tercet.training.documents import DataError
from tercet.training.packing import Packing, concatenate, pack
from tercet.training.token_set import TokenSet
from tercet.training.weighted_order import WeightedOrder

PackingName = Literal["best_fit", "concatenate"]


@dataclass(frozen=True)
class Arrangement:
    """What `PackedDataset` and `PackedBatches` are made of.

    Attributes:
        packing: Which documents stand in which row.
        order: Which row is which sample; None is the order without weights, every row once in an epoch.
    """

    packing: Packing
    order: Order | None = None


def arrange(
    token_set: TokenSet,
    sequence_length: int,
    *,
    packing: PackingName = "best_fit",
    seed: int = 0,
    weights: Mapping[str, float] | None = None,
) -> Arrangement:
    """Pack a token set and order its rows.

    With weights a row holds documents of one source, and sources take turns by their weights, which are shares of rows.
    Rows are full but for under 1 % of their slots, so they are shares of tokens as well.

    Args:
        token_set: The training split.
        sequence_length: T.
        packing: How documents fill rows.
        seed: Of the order.
        weights: Of the sources, by their labels in `token_set.sources`; None takes all text once in an epoch.

    Raises:
        DataError: Less text than one row; a source that has text and no weight, or a weight and no text.
        ValueError: A weight that is not above 0, or too small beside the others.
    """
    pack_documents = concatenate if packing == "concatenate" else pack
    if weights is None:
        return Arrangement(pack_documents(token_set.document_lengths, sequence_length))
    sources = np.unique(token_set.document_sources)
    labels = [token_set.sources[source] for source in sources]
    if missing := sorted(set(labels) - set(weights)):
        raise DataError(f"Source {missing[0]} has text but no weight. Give each source a weight, or none of them.")
    if missing := sorted(set(weights) - set(labels)):
        raise DataError(f"Source {missing[0]} has a weight but no text to train on. Remove it, or look into its data.")
    parts = []
    for source, label in zip(sources, labels, strict=True):
        documents = np.flatnonzero(token_set.document_sources == source)
        try:
            part = pack_documents(token_set.document_lengths[documents], sequence_length)
        except DataError as error:
            raise DataError(f"Source {label}: {error}") from error
        parts.append((documents, part))
    joined, row_bounds = _join(parts, sequence_length)
    return Arrangement(joined, WeightedOrder(seed, [weights[label] for label in labels], row_bounds))


def _join(parts: list[tuple[np.ndarray, Packing]], sequence_length: int) -> tuple[Packing, np.ndarray]:
    """Packings of some documents each as one of all, and the rows of each part as bounds, (S + 1,)."""
    num_pieces = np.cumsum([0, *(len(part.document) for _, part in parts)])
    offsets = [part.row_offsets[:-1] + first for (_, part), first in zip(parts, num_pieces, strict=False)]
    packing = Packing(
        sequence_length,
        np.concatenate([*offsets, num_pieces[-1:]]).astype(np.int64),
        np.concatenate([documents[part.document] for documents, part in parts]),
        np.concatenate([part.start for _, part in parts]),
        np.concatenate([part.length for _, part in parts]),
    )
    return packing, np.cumsum([0, *(part.num_rows for _, part in parts)])
