"""How often a run reads each of its sources, by the weights of the recipe."""

from collections.abc import Mapping

import numpy as np

from tercet.training.documents import DataError
from tercet.training.token_set import TokenSet

MAX_USEFUL_EPOCHS = 4
"""Up to here repeated text teaches nearly as much as new text; beyond, less and less (arXiv:2305.16264)."""


def tokens_by_source(token_set: TokenSet) -> dict[str, int]:
    """Stored tokens of each source under its label."""
    sums = np.zeros(len(token_set.sources), dtype=np.int64)
    np.add.at(sums, token_set.document_sources, token_set.document_lengths)
    return dict(zip(token_set.sources, sums.tolist(), strict=True))


def epochs_by_source(
    tokens: Mapping[str, int], weights: Mapping[str, float] | None, total_tokens: int
) -> dict[str, float]:
    """How many times each source is read while a run consumes `total_tokens`.

    Args:
        tokens: Of each source, as it is stored.
        weights: Each source's part of the tokens, in any unit; None reads every stored token equally often.
        total_tokens: Steps times rows times tokens of a row.

    Raises:
        DataError: If a source with a weight has no tokens, a source has no weight, or there are no tokens at all.
    """
    if not any(tokens.values()):
        raise DataError("The data holds no token. Check the sources.")
    if weights is None:
        return {source: total_tokens / sum(tokens.values()) for source in tokens}
    if without := sorted(set(tokens) - set(weights)):
        raise DataError(f"The data holds {', '.join(without)}, which the mixture gives no weight. Prepare it again.")
    if nothing := sorted(source for source in weights if not tokens.get(source)):
        raise DataError(
            f"{', '.join(nothing)} has a weight in the mixture, but no token to train on: every document of it was "
            f"left out or held out. Remove it from data.sources, or give it more text."
        )
    total_weight = sum(weights.values())
    return {source: total_tokens * weights[source] / total_weight / tokens[source] for source in tokens}


def mixture_lines(tokens: Mapping[str, int], weights: Mapping[str, float] | None, total_tokens: int) -> list[str]:
    """What to print before training: a line for each source, and a warning for each that is repeated too often."""
    epochs = epochs_by_source(tokens, weights, total_tokens)
    width = max(map(len, epochs))
    shown = [
        f"{source:<{width}}  {tokens[source]:>15,} tokens  {tokens[source] * times / total_tokens:>6.1%} of the run  "
        f"{times:,.2f} epochs"
        for source, times in epochs.items()
        if total_tokens
    ]
    return shown + [
        f"Warning: {source} is read {times:.1f} times over; beyond about {MAX_USEFUL_EPOCHS} times repetition teaches "
        f"less and less (arXiv:2305.16264). Lower its weight, train for fewer steps, or give more text."
        for source, times in epochs.items()
        if times > MAX_USEFUL_EPOCHS
    ]
