import itertools
import time

import pytest

from labsupport.profiling.timing import (
    IN_A_ROW,
    Timing,
    measure_interleaved,
    measure_ratio,
    measure_time,
    ratio_of,
)
from labsupport.profiling.units import format_ms


def test_quartiles_interpolate_and_milliseconds_are_written_without_exponent():
    timing = Timing((1.0, 2.0, 3.0, 4.0))
    assert (timing.q1, timing.median, timing.q3) == (1.75, 2.5, 3.25)
    assert (timing.min, timing.max, timing.mean, timing.repeats) == (1.0, 4.0, 2.5, 4)
    assert timing.notch == pytest.approx(1.57 * 1.5 / 2)
    written = [format_ms(ms) for ms in (0.01234, 1, 9.876, 10, 100, 1234.5)]
    assert written == ["0.012", "1.00", "9.88", "10.0", "100", "1234"]


@pytest.mark.parametrize(
    ("bounds", "repeats"),
    [
        ({"max_seconds": 0}, 4),  # time is up
        ({"max_seconds": 60, "precision": -1.0}, 9),  # the precision is out of reach
        ({"max_seconds": 60, "precision": 1e9}, 4),
    ],
)
def test_repeats_stay_within_their_bounds_and_warm_up_calls_are_no_samples(bounds, repeats):
    calls = []
    options = {"device": "cpu", "min_repeats": 4, "max_repeats": 9, "min_seconds": 0, "warmup": 3}

    def call():
        time.sleep(0.0015)  # not short: each call is a sample of its own
        calls.append(1)

    assert measure_time(call, **options, **bounds).repeats == repeats
    assert len(calls) == 3 + repeats


def test_a_short_call_that_loses_its_core_now_and_then_counts_as_its_fastest_in_a_row():
    calls = itertools.count(1)
    slow = measure_time(
        lambda: next(calls) % 3 or time.sleep(0.02),
        device="cpu",
        warmup=1,
        max_repeats=9,
        max_seconds=60,
        precision=-1.0,
    )
    assert slow.repeats == 9
    assert slow.median < 5


def test_calls_take_turns_and_a_ratio_is_the_median_of_the_pairs():
    order, bounds = [], {"device": "cpu", "warmup": 0, "min_repeats": 3, "max_repeats": 3}
    functions = {name: lambda name=name: order.append(name) for name in "ab"}
    measure_interleaved(functions, max_seconds=60, **bounds)
    assert order == [name for name in "ababab" for _ in range(IN_A_ROW)]
    ratio = ratio_of(Timing((2.0, 9.0, 4.0)), Timing((1.0, 3.0, 4.0)), ("slow", "fast"))
    assert ratio.samples == (2.0, 3.0, 1.0)
    assert str(ratio).startswith("slow / fast = 2.00")
    assert measure_ratio(lambda: None, lambda: sum(range(10_000)), **bounds).median < 1
    with pytest.raises(ValueError, match="2 and 1 samples"):
        ratio_of(Timing((1.0, 2.0)), Timing((1.0,)))
