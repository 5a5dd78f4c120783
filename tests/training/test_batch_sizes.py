"""Global batches that grow in stages."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from resumed_runs import assert_same_run, losses, silently, train_until_killed

from tercet.training.batch_sizes import BatchSizes
from tercet.training.pipeline import train
from tercet.training.recipe import RecipeError

STAGES = [{"until_step": 2, "global_batch_size": 2}, {"until_step": 5, "global_batch_size": 6}]


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), max_size=4), st.integers(0, 40))
def test_the_samples_of_all_steps_before(final, lengths_and_sizes, step):
    ends, end = [], 0
    for length, size in lengths_and_sizes:
        end += length
        ends.append((end, size))
    sizes = BatchSizes(final, tuple(ends))
    assert sizes.before(step) == sum(sizes.at(earlier) for earlier in range(step))
    by_hand = [size for length, size in lengths_and_sizes for _ in range(length)]
    assert sizes.at(step) == (by_hand[step] if step < len(by_hand) else final)


def test_a_run_whose_batches_grow(make_recipe, tmp_path):
    recipe = make_recipe(training={"batch_size_warmup": STAGES, "save_every": 1})
    train_until_killed(recipe, tmp_path / "killed", 4)  # inside the second stage
    outcome = train(recipe, output_dir=tmp_path / "killed", say=silently)
    train(recipe, output_dir=tmp_path / "whole", say=silently)
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    tokens = [0, *(record["tokens"] for record in losses(tmp_path / "whole") if "loss_nats" in record)]
    # No padding to speak of: every slot is a label.
    assert [after - before for before, after in pairwise(tokens)] == pytest.approx(
        [rows * 32 for rows in (2, 2, 6, 6, 6, 4, 4, 4)], rel=0.05
    )
    assert outcome.results.training.tokens_seen == tokens[-1]


@pytest.mark.parametrize(
    ("training", "message"),
    [
        (
            {"batch_size_warmup": [{"until_step": 2, "global_batch_size": 3}]},
            r"global_batch_size \(3\) is not a multiple",
        ),
        ({"batch_size_warmup": [*STAGES, {"until_step": 5, "global_batch_size": 2}]}, r"must ascend .*\[2, 5, 5\]"),
        ({"batch_size_warmup": [{"until_step": 9, "global_batch_size": 2}]}, r"ends with step 9, after .* \(8\)"),
        ({"global_batch_size": 5}, r"global_batch_size \(5\) is not a multiple"),
    ],
)
def test_stages_that_have_no_meaning(make_recipe, training, message):
    with pytest.raises(RecipeError, match=message):
        make_recipe(training=training)
