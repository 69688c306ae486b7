"""Times and memory predicted from ceilings, on recorded runs, and the backend recommended."""

import functools
import math
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from labsupport.analysis import predictor
from labsupport.analysis.predictor import (
    SPLITS,
    OutOfRangeError,
    calibrate,
    device_of_run,
    divide,
    non_negative_least_squares,
    predict,
    transfer,
    with_predictions,
)
from labsupport.analysis.recommend import recommend
from labsupport.analysis.work import Device, features, fused_bytes, makespan
from labsupport.profiling.grids import Case
from labsupport.profiling.runs import load_run

CPU_RUN = "calibration-cpu"
SHAPE = ["batch", "seqlen", "kv_seqlen", "heads", "kv_heads", "head_dim", "dtype", "causal"]
CASE = Case("sdpa_cudnn", 2048, batch=4, heads=16, dtype="bfloat16")
THREAD = Device("a thread", "cpu", 1, 10.0, {"float32": 1e-3}, 1.0)
calibrated = functools.cache(predictor.calibrate_run)


def timed(cases, ms, spread=0.0):
    return pd.DataFrame({"case": cases, "ms": ms, "spread": spread})


def sized(seqlen, **changes):
    return replace(CASE, seqlen=seqlen, kv_seqlen=seqlen, **changes)


@functools.cache
def table_of(run):
    model, held_out = calibrated(run)
    return with_predictions(held_out, model)


@pytest.fixture(scope="module")
def h200():
    return calibrated("attention-h200")[0]


# --- the protocol -------------------------------------------------------------------------------


SLOW = [name for name in SPLITS if "peers" in name]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in SPLITS]
)
def test_held_out_shapes_are_not_read_and_predicted_within_the_targets(name):
    seen, held_out = divide(name)
    shapes = [set(side[SHAPE].itertuples(index=False)) for side in (seen, held_out)]
    assert shapes[0]
    assert not shapes[0] & shapes[1]
    recorded = load_run(name.split(":")[0])
    assert len(seen) + len(held_out) == (recorded.status == "ok").sum()
    on_cpu, table = name == CPU_RUN, table_of(name)
    if on_cpu:
        assert calibrate(seen, device_of_run(name)) == calibrated(name)[0]
    assert len(table) >= (20 if on_cpu else 40)
    assert table.error.abs().mean() <= (0.2 if on_cpu else 0.1)
    assert table.covered.mean() >= 0.85
    if name == "attention-h200":
        assert table.memory_error.abs().fillna(1).max() <= 0.03


H200_RUNS = [name for name in SPLITS if "h200" in name]


@pytest.mark.parametrize("names", [pytest.param(H200_RUNS, marks=pytest.mark.slow), [CPU_RUN]])
def test_19_of_20_choices_are_within_5_percent_of_the_best(names):
    cost = []
    for name in names:
        for _, group in table_of(name).groupby([*SHAPE, "direction"]):
            cost.append(group.ms[group.predicted_ms.idxmin()] / group.ms.min())
    assert len(cost) >= 20
    assert np.mean(np.array(cost) <= 1.05) >= 0.95


def test_what_is_too_far_from_the_calibrated_lengths_is_left_out():
    model, held_out = calibrated("attention-h200")
    rows = held_out.head(2).assign(case=[held_out.case[0], sized(10**6)])
    table = with_predictions(rows, model)
    assert list(table.index) == [0]
    assert "too far" in table.attrs["refused"][1]


# --- work, counted ------------------------------------------------------------------------------


def test_free_units_take_the_longest_block_first():
    for costs, copies, units, time in (
        ((1,), 132, 132, 1),
        ((1,), 133, 132, 2),
        ((1, 2, 3, 4), 1, 2, 5),  # 4 and 1 beside 3 and 2
        ((8, 1, 1), 1, 3, 8),
        ((3, 5), 10_000, 132, 80_000 / 132),  # no wave is half empty
    ):
        assert makespan(costs, copies, units) == pytest.approx(time)


def test_a_causal_mask_skips_tiles_above_the_diagonal_and_stored_scores_skip_none():
    case = Case("sdpa_efficient", 256, heads=1)
    whole, half = (features(replace(case, causal=c), THREAD) for c in (False, True))
    # Tiles of 64 x 64: 10 of 16 hold a visible score, and the 4 of the diagonal a hidden one.
    assert half["matmul"] / whole["matmul"] == pytest.approx(10 / 16)
    assert half["edge"] / half["matmul"] == pytest.approx(4 / 10)
    # Two products of 2 FLOPs for each score and each of 64 columns, at 10^9 FLOPs a second.
    assert whole["matmul"] == pytest.approx(2 * 2 * 64 * 256**2 / 1e9 * 1e3)
    stored = Case("standard", 256, heads=1)
    plain, causal = (features(replace(stored, causal=c), THREAD) for c in (False, True))
    assert plain["matmul"] == causal["matmul"]
    assert plain["mask"] == 0 < causal["mask"]


def test_fused_bytes_are_inputs_and_results_and_a_float32_sum():
    case = Case("sdpa_flash", 100, batch=2, heads=8, kv_heads=2, head_dim=64, dtype="bfloat16")
    q = 2 * 100 * 8 * 64 * 2
    assert fused_bytes(case) == q + 2 * q / 4 + q
    both = fused_bytes(replace(case, direction="forward+backward"))
    # q, out, dout, dq; k, v, dk, dv; dq in float32 twice; lse and its like, four times.
    assert both - fused_bytes(case) == 4 * q + 4 * q / 4 + 2 * 2 * q + 4 * 4 * 2 * 100 * 8


# --- the fit ------------------------------------------------------------------------------------


def test_non_negative_least_squares_finds_known_weights_and_zeros_negative_ones():
    a = np.random.default_rng(0).random((30, 4))
    x = np.array([0.5, 0.0, 2.0, 0.0])
    assert non_negative_least_squares(a, a @ x) == pytest.approx(x)
    b = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    assert non_negative_least_squares(b, np.array([1.0, -1.0, 0.5])) == pytest.approx([0.75, 0])


def test_weights_that_made_the_times_are_found_again(h200):
    cases = [
        sized(n, causal=causal, head_dim=d)
        for n in (512, 1024, 2048, 8192)
        for causal in (False, True)
        for d in (64, 128)
    ]
    made = {"launch": 0.02, "matmul": 1.4, "exp": 0.8, "edge": 0.5, "memory": 1.2}

    def ms(case):
        found = features(case, h200.device)
        work = sum(made[name] * found[name] for name in made if name != "launch")
        return math.hypot(made["launch"], work)  # starting and work overlap

    model = calibrate(timed(cases, [ms(case) for case in cases]), h200.device)
    other = sized(4096, causal=True)
    assert predict(other, model).ms == pytest.approx(ms(other), rel=0.02)


def test_a_noisy_measurement_counts_less_and_two_are_too_few(h200):
    cases = [sized(n) for n in (512, 1024, 2048, 4096, 8192)]
    times = [features(case, h200.device)["matmul"] * 1.5 for case in cases]
    right = times[0]
    times[0] *= 4  # an odd one
    trusted, doubted = (
        predict(sized(512), calibrate(timed(cases, times, spread), h200.device)).ms
        for spread in (0.0, [1.0, 0, 0, 0, 0])
    )
    assert abs(doubted - right) < abs(trusted - right)
    with pytest.raises(ValueError, match="at least 3 are needed, of: sdpa_cudnn bfloat16 forward"):
        calibrate(timed(cases[:2], times[:2]), h200.device)


# --- predictions --------------------------------------------------------------------------------


def test_a_prediction_lies_in_its_interval_and_says_what_the_time_consists_of(h200):
    found = predict(replace(CASE, seqlen=1024), h200)
    assert found.low_ms < found.ms < found.high_ms
    parts = "matrix products", "cases calibrated", "partly overlapped"
    assert all(part in found.because for part in parts)
    # Parts that overlap add up to more than the whole.
    assert sum(int(share) for share in re.findall(r"(\d+)%", found.because)) > 102


def test_what_was_not_calibrated_is_refused(h200):
    for change, message in (
        ({"head_dim": 96}, "head_dim 96 is not calibrated"),
        ({"dtype": "float16"}, "float16 forward is not calibrated"),
        ({"backend": "fa2"}, "fa2 bfloat16 forward is not calibrated"),
        ({"seqlen": 65_537}, "seqlen 65537 is too far"),
        ({"kv_seqlen": 127}, "kv_seqlen 127 is too far"),
    ):
        with pytest.raises(OutOfRangeError, match=message):
            predict(replace(CASE, **change), h200)


# --- devices known by specification -------------------------------------------------------------


def test_predictions_from_a_specification_say_so_and_are_less_certain(h200):
    here, same, near, far = (
        predict(CASE, model)
        for model in (h200, *(transfer(h200, n) for n in ("H200", "H100 PCIe", "A100 SXM 80 GB")))
    )
    assert (here.from_specification, near.from_specification) == (False, True)
    assert "by specification alone" in near.because
    widths = [found.high_ms / found.low_ms for found in (here, near, far)]
    assert widths == sorted(widths)
    assert same.high_ms / same.low_ms == pytest.approx(widths[0])
    assert here.ms < near.ms < far.ms


def test_backends_that_need_a_newer_gpu_are_left_out_and_unknown_gpus_refused(h200):
    a100, like = transfer(h200, "A100 SXM 80 GB"), h200.device
    # The same share of the specification: 312 TFLOP/s and 2039 GB/s.
    share = like.matmul_tflops["bfloat16"] / 989.5
    assert a100.device.matmul_tflops["bfloat16"] / 312 == pytest.approx(share)
    assert a100.device.copy_gb_s / 2039 == pytest.approx(like.copy_gb_s / 4800)
    assert "9.0" in a100.left_out["fa4"]
    assert "fa4" not in a100.backends("bfloat16", "forward")
    assert transfer(h200, "T4").backends("bfloat16", "forward") == []
    with pytest.raises(ValueError, match="A100 SXM 80 GB"):
        transfer(h200, "A900")
    with pytest.raises(ValueError, match="nothing to compare it with"):
        transfer(replace(h200, device=THREAD), "H200")


# --- peak memory --------------------------------------------------------------------------------


def test_memory_is_results_and_multiples_of_what_a_case_holds(h200):
    case = sized(2048, backend="standard")
    out, scores = 4 * 2048 * 16 * 64 * 2, 4 * 16 * 2048**2 * 2
    for changes, expected in (
        ({}, 2 * out + 2 * scores),  # the output, and the copy of v that a batch takes
        ({"causal": True}, 2 * out + 2 * scores + 2048**2),
        ({"direction": "forward+backward"}, 4 * out + 4 * scores),
        ({"backend": "fa4"}, out),
    ):
        found = predict(replace(case, **changes), h200).peak_memory_bytes
        assert found == pytest.approx(expected, rel=1e-6)


def test_without_measured_memory_none_is_predicted(h200):
    model = calibrate(timed([sized(n) for n in (512, 1024, 2048)], [1.0, 2, 3]), h200.device)
    assert predict(CASE, model).peak_memory_bytes is None


# --- which backend for a workload -----------------------------------------------------------------

WORKLOAD = Case("", 8192, batch=4, heads=16, dtype="bfloat16")


def test_the_choice_is_the_fastest_predicted_and_those_within_its_interval_are_named(h200):
    found = recommend(WORKLOAD, h200)
    assert [*found.ranking] == sorted(found.ranking, key=lambda pair: pair[1].ms)
    assert found.prediction == predict(replace(WORKLOAD, backend=found.backend), h200)
    assert f"Next: {found.ranking[1][0]}" in str(found)
    close = [name for name, other in found.ranking[1:] if other.ms <= found.prediction.high_ms]
    assert found.close == close
    assert found.backend == "fa4"  # as measured
    assert recommend(replace(WORKLOAD, direction="forward+backward"), h200).backend == "fa4"


def test_what_does_not_fit_or_cannot_is_excluded_with_the_reason(h200):
    found = recommend(WORKLOAD, h200, memory_gib=4)
    assert "there are 4.0 GiB" in found.excluded["standard"]
    assert "standard" not in recommend(WORKLOAD, h200).excluded
    grouped = recommend(replace(WORKLOAD, kv_heads=4), h200)
    assert "grouped" in grouped.excluded["sdpa_efficient"]
    a100 = str(recommend(WORKLOAD, transfer(h200, "A100 SXM 80 GB")))
    assert "predicted from its specification" in a100
    assert "Not fa4: needs compute capability 9.0" in a100
    for change, message in (
        ({"head_dim": 80}, "sdpa_flash: head_dim 80"), ({"dtype": "float32"}, "none is calibrated")
    ):  # fmt: skip
        with pytest.raises(OutOfRangeError, match=message):
            recommend(replace(WORKLOAD, **change), h200)
