import pytest

from tercet.training.counts import megabytes


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [(1, "1 byte"), (4_999, "4,999 bytes"), (5_000, "0.01 MB"), (1_796_000, "1.80 MB"), (2_345_678_900, "2,345.68 MB")],
)
def test_text_is_in_megabytes_unless_that_would_be_none(num_bytes: int, shown: str):
    assert megabytes(num_bytes) == shown
