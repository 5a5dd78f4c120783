import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.training.order import epoch_key, permuted, permuted_array, sample_row, sample_rows


@given(st.integers(1, 3000), st.binary(max_size=8))
def test_it_is_a_permutation(size: int, key: bytes):
    assert np.array_equal(np.sort(permuted_array(np.arange(size), size, key)), np.arange(size))


def test_sizes_beyond_memory():
    size = 10**15
    indexes = np.array([0, 1, size // 2, size - 1])
    values = permuted_array(indexes, size, b"k")
    assert len(set(values.tolist())) == 4
    assert values.min() >= 0
    assert values.max() < size
    assert [permuted(int(i), size, b"k") for i in indexes] == values.tolist()


def test_it_looks_shuffled_and_differs_by_epoch_and_seed():
    size = 5000
    orders = [permuted_array(np.arange(size), size, epoch_key(s, e)) for s, e in ((0, 0), (0, 1), (1, 0), (11, 0))]
    for i, order in enumerate(orders):
        assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.06
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.06
        for other in orders[:i]:
            assert np.mean(order == other) < 0.005
            assert abs(np.corrcoef(order, other)[0, 1]) < 0.06


def test_every_row_comes_first_about_equally_often():
    firsts = [sample_row(seed, 0, 0, 10) for seed in range(2000)]
    assert np.bincount(firsts, minlength=10).min() > 140


def test_the_order_never_changes_between_versions():
    assert sample_rows(3, np.arange(18, 24), 10).tolist() == [1, 7, 9, 7, 1, 2]


def test_samples_count_through_epochs():
    rows = sample_rows(7, np.arange(35), 10)
    assert rows.tolist() == [sample_row(7, n // 10, n % 10, 10) for n in range(35)]


@pytest.mark.parametrize("index", [-1, 10])
def test_an_index_outside_is_refused(index: int):
    with pytest.raises(ValueError, match=r"range\(10\)"):
        permuted(index, 10, b"")
