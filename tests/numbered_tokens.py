"""A token set in which every token can be told from every other."""

import numpy as np

EOS, PAD = 0, 1


class NumberedTokens:
    """Documents of given lengths whose every token has a number of its own, but for the end-of-text tokens."""

    def __init__(self, lengths: list[int], sources: list[int] | None = None) -> None:
        self.document_lengths = np.array(lengths, dtype=np.int64)
        self.document_sources = np.array(sources if sources is not None else [0] * len(lengths), dtype=np.int64)
        self.sources = [f"source-{source}" for source in range(int(self.document_sources.max(initial=0)) + 1)]
        self.num_tokens = int(self.document_lengths.sum())
        self.first = 2 + np.cumsum(self.document_lengths) - self.document_lengths

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= self.document_lengths[document]
        tokens = self.first[document] + np.arange(start, stop)
        return np.where(np.arange(start, stop) == self.document_lengths[document] - 1, EOS, tokens)

    def label_mask(self, document: int, start: int, stop: int) -> np.ndarray | None:
        return None

    def everything(self) -> list[int]:
        """All stored tokens, sorted."""
        return sorted(t for d, n in enumerate(self.document_lengths) for t in self.tokens(d, 0, int(n)).tolist())
