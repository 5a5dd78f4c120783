from itertools import pairwise

import numpy as np
import pytest
from numbered_tokens import NumberedTokens

from tercet.training.arrangement import arrange
from tercet.training.documents import DataError
from tercet.training.packing import concatenate, pack


def test_without_weights_rows_are_those_of_the_packing():
    tokens = NumberedTokens([5, 20, 9, 30])
    for name, function in (("best_fit", pack), ("concatenate", concatenate)):
        arrangement = arrange(tokens, 8, packing=name)
        assert arrangement.order is None
        expected = function(tokens.document_lengths, 8)
        for field in ("row_offsets", "document", "start", "length"):
            assert np.array_equal(getattr(arrangement.packing, field), getattr(expected, field))


@pytest.mark.parametrize("packing", ["best_fit", "concatenate"])
def test_with_weights_a_row_holds_documents_of_one_source(packing):
    rng = np.random.default_rng(0)
    lengths, sources = rng.integers(1, 50, size=90), rng.integers(0, 3, size=90)
    tokens = NumberedTokens(lengths.tolist(), sources.tolist())
    weights = {"source-2": 5, "source-0": 1, "source-1": 2}
    arrangement = arrange(tokens, 16, packing=packing, weights=weights)
    packed, bounds = arrangement.packing, arrangement.order.row_bounds
    assert packed.num_rows == bounds[-1]
    assert packed.num_tokens == lengths.sum()
    for row in range(packed.num_rows):
        source = int(np.searchsorted(bounds, row, side="right")) - 1
        pieces = slice(packed.row_offsets[row], packed.row_offsets[row + 1])
        assert set(sources[packed.document[pieces]].tolist()) == {source}
    # Weights go by name, whatever order they were given in; rows are nearly full, so shares of rows are of tokens.
    rows = arrangement.order(np.arange(800))
    filled = np.add.reduceat(packed.length, packed.row_offsets[:-1])
    shares = [filled[rows[(rows >= a) & (rows < b)]].sum() for a, b in pairwise(bounds)]
    assert np.array(shares) / sum(shares) == pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=0.01)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"source-0": 1}, "source-1 has text but no weight"),
        ({"source-0": 1, "source-1": 1, "wiki": 2}, "wiki has a weight but no text"),
    ],
)
def test_weights_that_do_not_match_the_text(weights, message):
    with pytest.raises(DataError, match=message):
        arrange(NumberedTokens([20, 20], [0, 1]), 8, weights=weights)


def test_a_source_of_less_than_a_row_is_named():
    with pytest.raises(DataError, match="Source source-1: The training text has 5 tokens, fewer than one row of 8"):
        arrange(NumberedTokens([20, 5], [0, 1]), 8, weights={"source-0": 1, "source-1": 1})
