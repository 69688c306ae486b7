import itertools

import pytest

from labsupport.profiling.timing import (
    Timing,
    format_ms,
    measure_interleaved,
    measure_ratio,
    measure_time,
    quantile,
    ratio_of,
)


def test_quartiles_interpolate_between_samples():
    timing = Timing((1.0, 2.0, 3.0, 4.0))
    assert (timing.q1, timing.median, timing.q3) == (1.75, 2.5, 3.25)
    assert (timing.min, timing.max, timing.mean, timing.repeats) == (1.0, 4.0, 2.5, 4)


def test_a_timing_reads_as_median_spread_and_count_and_needs_a_sample():
    assert str(Timing((12.1, 12.3, 12.6))) == "12.3 ms (IQR 12.2-12.4, n=3)"
    assert quantile((7.0,), 0.25) == 7.0
    with pytest.raises(ValueError, match="at least one sample"):
        Timing(())


@pytest.mark.parametrize(
    ("ms", "text"), [(0.01234, "0.012"), (1.234, "1.23"), (12.34, "12.3"), (1234.5, "1234")]
)
def test_milliseconds_are_written_without_exponent(ms, text):
    assert format_ms(ms) == text


def test_warm_up_calls_are_not_samples():
    calls = itertools.count()
    timing = measure_time(
        lambda: next(calls), device="cpu", warmup=3, min_repeats=7, max_repeats=7, max_seconds=60
    )
    assert timing.repeats == 7
    assert next(calls) == 3 + 7


@pytest.mark.parametrize(
    ("bounds", "repeats"),
    [
        ({"max_seconds": 0}, 4),  # time is up
        ({"max_seconds": 60, "precision": -1.0}, 9),  # the precision is out of reach
        ({"max_seconds": 60, "precision": 1e9}, 4),
    ],
)
def test_repeats_stay_within_their_bounds(bounds, repeats):
    options = {"device": "cpu", "min_repeats": 4, "max_repeats": 9, "min_seconds": 0}
    assert measure_time(lambda: None, **options, **bounds).repeats == repeats


def test_interleaved_functions_take_turns():
    order: list[str] = []
    timings = measure_interleaved(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")},
        device="cpu",
        warmup=0,
        min_repeats=3,
        max_repeats=3,
        max_seconds=60,
    )
    assert order == ["a", "b"] * 3
    assert {name: timing.repeats for name, timing in timings.items()} == {"a": 3, "b": 3}


def test_a_ratio_is_the_median_of_the_pairs_not_the_ratio_of_the_medians():
    ratio = ratio_of(Timing((2.0, 9.0, 4.0)), Timing((1.0, 3.0, 4.0)), ("slow", "fast"))
    assert ratio.samples == (2.0, 3.0, 1.0)
    assert ratio.median == 2.0
    assert str(ratio).startswith("slow / fast = 2.00")


def test_timings_of_different_runs_give_no_ratio():
    bounds = {"device": "cpu", "min_repeats": 3, "max_repeats": 3}
    assert len(measure_ratio(lambda: None, lambda: None, **bounds).samples) == 3
    with pytest.raises(ValueError, match="not pairs"):
        ratio_of(Timing((1.0, 2.0)), Timing((1.0,)))


def test_contradicting_bounds_are_refused():
    with pytest.raises(ValueError, match="min_repeats"):
        measure_time(lambda: None, device="cpu", min_repeats=5, max_repeats=4)
    with pytest.raises(ValueError, match="nothing to time"):
        measure_interleaved({})
    with pytest.raises(ValueError, match="min_seconds"):
        measure_time(lambda: None, device="cpu", min_seconds=2, max_seconds=1)


def test_an_error_of_the_call_passes_through():
    def broken() -> None:
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        measure_time(broken, device="cpu")
