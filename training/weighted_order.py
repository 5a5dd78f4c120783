"""A mixture by weights without state: which source sample n comes from, and which of its rows, as functions of n.

The weights are whole numbers of rows in a period, in which the sources take turns so evenly that after any number of
samples each has had its share to within one row: Tijdeman's solution of the chairman assignment problem (Discrete
Mathematics 32, 1980). A period is computed once; sample n is then a lookup and the permutation of an epoch of a source.

Shapes: S sources, D samples of a period.
"""

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from tercet.training.order import permuted_array

MAX_PERIOD = 1 << 16
"""Longest period D; weights that need a longer one are kept to a part in MAX_PERIOD."""


class WeightedOrder:
    """Rows of samples from several sources, each visited in a new order in each of its own epochs.

    Sample n is a row of source s(n), its k-th sample; row permuted(k % R) of epoch k // R of that source, where R is
    the number of its rows. After any number of samples each source has had its share of them to within one row, and
    within R samples of a source every row of it comes once. Called with samples, it is an `Order` of `PackedBatches`.
    """

    def __init__(self, seed: int, weights: Sequence[float], row_bounds: np.ndarray) -> None:
        """
        Args:
            seed: Chooses the permutations.
            weights: Of the sources, in any unit, (S,).
            row_bounds: Source s has rows row_bounds[s] <= row < row_bounds[s + 1], int64 (S + 1,).

        Raises:
            ValueError: A weight that is not above 0, or too small beside the others; a source without rows.
        """
        self.row_bounds = np.asarray(row_bounds, dtype=np.int64)
        self.num_rows = np.diff(self.row_bounds)
        if len(weights) != len(self.num_rows):
            raise ValueError(f"{len(weights)} weights were given for {len(self.num_rows)} sources.")
        if len(empty := np.flatnonzero(self.num_rows < 1)):
            raise ValueError(f"source {empty[0]} has no rows: leave it out of the mixture.")
        self.seed = seed
        self.counts = np.array(whole_weights(weights), dtype=np.int64)
        """Samples of each source in a period, (S,)."""
        self._source = turns(self.counts.tolist())
        self._before = np.empty_like(self._source)  # of this source, earlier in the period
        for source in range(len(self.counts)):
            chosen = self._source == source
            self._before[chosen] = np.arange(chosen.sum())

    def places(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each sample, and how many samples of that source come before it."""
        periods, within = np.divmod(np.asarray(samples, dtype=np.int64), len(self._source))
        sources = self._source[within]
        return sources, periods * self.counts[sources] + self._before[within]

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        """The row of each sample, int64 of the shape of `samples`."""
        sources, ordinals = self.places(samples)
        epochs, indexes = np.divmod(ordinals, self.num_rows[sources])
        rows = np.empty_like(indexes)
        for source, epoch in {*zip(sources.ravel().tolist(), epochs.ravel().tolist(), strict=True)}:
            chosen = (sources == source) & (epochs == epoch)
            key = f"tercet order {self.seed} {epoch} of source {source}".encode()
            permuted = permuted_array(indexes[chosen], int(self.num_rows[source]), key)
            rows[chosen] = self.row_bounds[source] + permuted
        return rows


def whole_weights(weights: Sequence[float]) -> list[int]:
    """The weights as whole numbers without a common divisor, their ratios kept as they were meant where that fits.

    0.7, 0.2 and 0.1 are 7, 2 and 1; a third and two thirds, which no float holds, are 1 and 2.

    Raises:
        ValueError: If a weight is not a number above 0, or is less than a part in MAX_PERIOD of all.
    """
    for weight in weights:
        if not (weight > 0 and math.isfinite(weight)):
            raise ValueError(f"a weight must be a number above 0, not {weight}.")
    total = math.fsum(weights)
    shares = [weight / total for weight in weights]
    meant = [Fraction(share).limit_denominator(MAX_PERIOD) for share in shares]
    period = math.lcm(*(share.denominator for share in meant))
    is_near = all(math.isclose(fraction, share, rel_tol=1e-12) for fraction, share in zip(meant, shares, strict=True))
    if is_near and sum(meant) == 1 and period <= MAX_PERIOD:
        return [int(share * period) for share in meant]
    whole = [int(share * MAX_PERIOD) for share in shares]
    by_remainder = sorted(range(len(whole)), key=lambda i: whole[i] - shares[i] * MAX_PERIOD)
    for i in by_remainder[: MAX_PERIOD - sum(whole)]:
        whole[i] += 1
    if 0 in whole:
        i = whole.index(0)
        raise ValueError(f"weight {weights[i]} is less than a part in {MAX_PERIOD} of all weights: leave it out.")
    return whole


def turns(counts: Sequence[int]) -> np.ndarray:
    """Whose turn each sample of a period is, (D,), D the sum of counts.

    After N samples, source s has had c with |c - N counts[s] / D| <= 1 - 1 / (2 S - 2): a turn may come as soon, and
    must come before, this bound would be left; of those that may, the most urgent one does.
    """
    period, parts = sum(counts), max(2 * len(counts) - 2, 1)
    # The number of samples before which turn c + 1 must come, and with which it may come.
    waiting = [(-(-period // (parts * count)), source) for source, count in enumerate(counts)]
    heapq.heapify(waiting)
    ready: list[tuple[int, int]] = []
    taken = [0] * len(counts)
    order = np.empty(period, dtype=np.int64)
    for position in range(period):
        while waiting and waiting[0][0] <= position + 1:
            source = heapq.heappop(waiting)[1]
            latest = (parts * (taken[source] + 1) - 1) * period // (parts * counts[source])
            heapq.heappush(ready, (latest, source))
        source = heapq.heappop(ready)[1]
        order[position] = source
        taken[source] += 1
        earliest = -(-(parts * taken[source] + 1) * period // (parts * counts[source]))
        heapq.heappush(waiting, (earliest, source))
    assert taken == list(counts)
    return order
