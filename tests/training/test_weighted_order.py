from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.training.weighted_order import MAX_PERIOD, WeightedOrder, turns, whole_weights


def bounds(num_rows: list[int]) -> np.ndarray:
    return np.cumsum([0, *num_rows])


MIXTURES = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=8)


@settings(max_examples=150, deadline=None)
@given(MIXTURES, st.integers(0, 5))
def test_every_prefix_has_each_source_by_its_weight_to_within_one_row(mixture: list[tuple[int, int]], seed: int):
    weights, num_rows = zip(*mixture, strict=True)
    order = WeightedOrder(seed, weights, bounds(list(num_rows)))
    num_samples = 2 * sum(weights) + 7
    sources, ordinals = order.places(np.arange(num_samples))
    for source, weight in enumerate(weights):
        drawn = np.cumsum(sources == source)
        assert np.abs(drawn - np.arange(1, num_samples + 1) * weight / sum(weights)).max() < 1
        assert ordinals[sources == source].tolist() == list(range(drawn[-1]))


@settings(max_examples=100, deadline=None)
@given(MIXTURES, st.integers(0, 5))
def test_each_source_is_visited_whole_in_each_of_its_epochs(mixture: list[tuple[int, int]], seed: int):
    weights, num_rows = zip(*mixture, strict=True)
    order = WeightedOrder(seed, weights, bounds(list(num_rows)))
    samples = np.arange(3 * max(-(-n * sum(weights) // w) for w, n in mixture))
    rows = order(samples)
    for source, size in enumerate(num_rows):
        first = int(bounds(list(num_rows))[source])
        own = rows[(rows >= first) & (rows < first + size)]
        epochs = own[: len(own) // size * size].reshape(-1, size)
        assert len(epochs) >= 2
        assert (np.sort(epochs) == np.arange(first, first + size)).all()


@settings(max_examples=60, deadline=None)
@given(MIXTURES, st.data())
def test_a_sample_needs_no_sample_before_it(mixture: list[tuple[int, int]], data):
    weights, num_rows = zip(*mixture, strict=True)
    order = WeightedOrder(1, weights, bounds(list(num_rows)))
    whole = order(np.arange(300))
    chosen = np.array(data.draw(st.lists(st.integers(0, 299), min_size=4, max_size=4))).reshape(2, 2)
    assert order(chosen).tolist() == whole[chosen].tolist()
    assert WeightedOrder(1, weights, bounds(list(num_rows)))(chosen).tolist() == whole[chosen].tolist()


def test_far_out_samples_cost_nothing():
    order = WeightedOrder(0, [7, 2, 1], bounds([10**12, 10**3, 5]))
    far = 10**15 + np.arange(10)
    sources, ordinals = order.places(far)
    assert np.bincount(sources).tolist() == [7, 2, 1]
    assert np.abs(ordinals - far * np.array([0.7, 0.2, 0.1])[sources]).max() < 1
    assert len(set(order(far).tolist())) >= 8


def test_order_differs_by_seed_epoch_and_source():
    two = bounds([50, 50])
    rows = [WeightedOrder(seed, [1, 1], two)(np.arange(200)) for seed in (0, 1)]
    first, second = rows[0][rows[0] < 50], rows[0][rows[0] >= 50] - 50
    assert first[:50].tolist() != first[50:].tolist()
    assert first[:50].tolist() != second[:50].tolist()
    assert rows[0].tolist() != rows[1].tolist()


def test_the_order_never_changes_between_versions():
    order = WeightedOrder(3, [0.5, 0.3, 0.2], bounds([6, 4, 3]))
    assert order(np.arange(12)).tolist() == [4, 8, 3, 10, 5, 6, 1, 12, 2, 7, 0, 9]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([0.7, 0.2, 0.1], [7, 2, 1]),
        ([2, 4], [1, 2]),
        ([5.0], [1]),
        ([1 / 3, 2 / 3], [1, 2]),
        ([3 / 7, 3 / 7, 1 / 7], [3, 3, 1]),
        ([0.1, 1e-3, 0.899], [100, 1, 899]),
    ],
)
def test_weights_are_kept_as_they_are_written(weights: list[float], expected: list[int]):
    assert whole_weights(weights) == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=12))
def test_long_weights_are_kept_to_a_small_part(weights: list[float]):
    whole = whole_weights(weights)
    assert sum(whole) <= MAX_PERIOD
    exact = [Fraction(str(weight)) for weight in weights]
    for mine, theirs in zip(whole, exact, strict=True):
        assert abs(Fraction(mine, sum(whole)) - theirs / sum(exact)) < Fraction(1, MAX_PERIOD)


def test_the_longest_period_keeps_the_bound():
    counts = [MAX_PERIOD - 4 - 20_011 - 3 * 7, 20_011, 7, 7, 7, 4]
    order = turns(counts)
    ideal = np.arange(1, MAX_PERIOD + 1)
    for source, count in enumerate(counts):
        assert np.abs(np.cumsum(order == source) - ideal * count / MAX_PERIOD).max() < 1


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1, 0], "above 0, not 0"),
        ([1, -2.0], r"above 0, not -2.0"),
        ([1, float("nan")], "above 0, not nan"),
        ([1, float("inf")], "above 0, not inf"),
        ([1, 1e-9], "1e-09 is less than a part in 65536"),
        ([1], "1 weights were given for 2 sources"),
    ],
)
def test_what_is_no_mixture_is_refused(weights: list[float], message: str):
    with pytest.raises(ValueError, match=message):
        WeightedOrder(0, weights, bounds([3, 3]))


def test_a_source_without_rows_is_refused():
    with pytest.raises(ValueError, match="source 1 has no rows"):
        WeightedOrder(0, [1, 1], bounds([3, 0]))
