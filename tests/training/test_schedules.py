"""Learning rate over a run."""

import pytest

from tercet.training.schedules import learning_rate_factor


def curve(**settings):
    return [learning_rate_factor(step, 100, **settings) for step in range(101)]


@pytest.mark.parametrize("schedule", ["cosine", "warmup_stable_decay", "constant"])
def test_warm_up_rises_evenly_to_the_peak(schedule):
    values = curve(schedule=schedule, warmup=9, decay_fraction=0.5)
    assert values[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert max(values) == pytest.approx(1.0)


def test_stable_then_linear():
    values = curve(schedule="warmup_stable_decay", decay_fraction=0.4, final_fraction=0.1)
    assert values[:61] == [1.0] * 61
    assert values[80] == pytest.approx(0.55)
    assert values[100] == pytest.approx(0.1)


def test_decay_in_steps_takes_the_place_of_the_fraction():
    in_steps = curve(schedule="warmup_stable_decay", decay_fraction=0.9, decay=40, final_fraction=0.1)
    assert in_steps == curve(schedule="warmup_stable_decay", decay_fraction=0.4, final_fraction=0.1)


def test_cosine_is_halfway_in_the_middle():
    values = curve(schedule="cosine")
    assert values[50] == pytest.approx(0.5)
    assert values[100] == pytest.approx(0.0)
    assert values == sorted(values, reverse=True)


def test_the_unit_does_not_matter():
    by_step = learning_rate_factor(70, 100, schedule="cosine", warmup=10)
    by_second = learning_rate_factor(7.0, 10.0, schedule="cosine", warmup=1.0)
    assert by_step == pytest.approx(by_second)


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="triangle"):
        learning_rate_factor(5, 10, schedule="triangle")  # type: ignore[arg-type]
