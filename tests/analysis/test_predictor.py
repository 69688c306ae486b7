"""Times predicted from ceilings: on recorded runs, so the same everywhere."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from labsupport.analysis.predictor import (
    Device,
    OutOfRangeError,
    calibrate,
    calibrate_run,
    device_from_specification,
    device_of_run,
    predict,
    transfer,
)
from labsupport.analysis.predictor.__main__ import main
from labsupport.analysis.predictor.calibration import non_negative_least_squares
from labsupport.analysis.predictor.evaluate import choices, errors_by, with_predictions
from labsupport.analysis.predictor.split import SHAPE, SPLITS, divide, recorded
from labsupport.analysis.predictor.work import features, fused_bytes, makespan
from labsupport.profiling.cases import Case

H200_RUNS = [name for name in SPLITS if "h200" in name]
CPU_RUN = "calibration-cpu"
TARGETS = dict.fromkeys(H200_RUNS, 0.1) | {CPU_RUN: 0.20}
CASE = Case("sdpa_cudnn", 2048, batch=4, heads=16, dtype="bfloat16")
THREAD = Device("a thread", "cpu", 1, 10.0, {"float32": 1e-3}, 1.0)


def sized(seqlen, **changes):
    return replace(CASE, seqlen=seqlen, kv_seqlen=seqlen, **changes)


@pytest.fixture(scope="module")
def models():
    return {name: calibrate_run(name) for name in SPLITS}


@pytest.fixture(scope="module")
def tables(models):
    return {name: with_predictions(held, model) for name, (model, held) in models.items()}


@pytest.fixture(scope="module")
def h200(models):
    return models["attention-h200"][0]


# --- the protocol -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPLITS)
def test_no_shape_is_on_both_sides_and_held_out_times_are_not_read(name, models):
    seen, held_out = divide(name)
    shapes = [set(side[list(SHAPE)].itertuples(index=False)) for side in (seen, held_out)]
    assert shapes[0]
    assert not shapes[0] & shapes[1]
    assert len(seen) + len(held_out) == len(recorded(name))
    device = device_of_run(name.split(":")[0])
    assert calibrate(seen.case, seen.ms, device, spreads=seen.spread) == models[name][0]


@pytest.mark.parametrize("name", SPLITS)
def test_held_out_shapes_are_predicted_within_the_targets(name, tables):
    table = tables[name]
    assert len(table) >= (20 if name == CPU_RUN else 40)
    assert table.error.abs().mean() <= TARGETS[name]
    assert table.covered.mean() >= 0.85
    if name in ("attention-h200", CPU_RUN):
        assert table.memory_error.abs().fillna(1).mean() <= 0.05


@pytest.mark.parametrize("names", [H200_RUNS, [CPU_RUN]])
def test_19_of_20_choices_are_within_5_percent_of_the_best(tables, names):
    cost = np.concatenate([choices(tables[name]).times_best for name in names])
    assert len(cost) >= 20
    assert (cost <= 1.05).mean() >= 0.95


def test_the_command_prints_errors_by_backend_and_the_choices(capsys, tables):
    main(["--run", "attention-h200", "--weights", "--cases"])
    text = capsys.readouterr().out
    assert "92 cases calibrate, 96 are tested" in text
    assert "Chosen within 5% of the best" in text
    last = errors_by(tables["attention-h200"]).iloc[-1]
    assert last.backend == "all"
    assert last.time_mape == pytest.approx(100 * tables["attention-h200"].error.abs().mean())


def test_cases_too_far_from_the_calibration_are_refused_and_not_counted(models):
    model, held = models["attention-h200"]
    rows = held.head(2).assign(case=[held.case[0], sized(10**6)])
    table = with_predictions(rows, model)
    assert list(table.index) == [0]
    assert "too far" in table.attrs["refused"][1]


# --- work, counted ------------------------------------------------------------------------------


def test_free_units_take_the_longest_block_first_and_one_more_than_units_doubles_the_time():
    assert [makespan((1,), copies, 132) for copies in (132, 133)] == [1, 2]
    assert makespan((1, 2, 3, 4), 1, 2) == 5  # 4 and 1 beside 3 and 2
    assert makespan((8, 1, 1), 1, 3) == 8
    assert makespan((3, 5), 10_000, 132) == pytest.approx(80_000 / 132)  # no wave is half empty


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

    model = calibrate(cases, map(ms, cases), h200.device)
    other = sized(4096, causal=True)
    assert predict(other, model).ms == pytest.approx(ms(other), rel=0.02)


def test_a_noisy_measurement_counts_less(h200):
    cases = [sized(n) for n in (512, 1024, 2048, 4096, 8192)]
    times = [features(case, h200.device)["matmul"] * 1.5 for case in cases]
    right = times[0]
    times[0] *= 4  # an odd one
    trusted, doubted = (
        predict(sized(512), calibrate(cases, times, h200.device, spreads=spreads)).ms
        for spreads in (None, [1.0, 0, 0, 0, 0])
    )
    assert abs(doubted - right) < abs(trusted - right)


def test_too_few_measurements_are_refused(h200):
    with pytest.raises(ValueError, match="too few"):
        calibrate([CASE, sized(4096)], [1.0, 2.0], h200.device)
    with pytest.raises(ValueError, match="nothing to calibrate on"):
        calibrate([], [], h200.device)


# --- predictions --------------------------------------------------------------------------------


@pytest.mark.parametrize(("causal", "direction"), [(False, "forward"), (True, "forward+backward")])
def test_more_work_takes_longer_on_every_backend(h200, causal, direction):
    for backend in h200.backends("bfloat16", direction):
        options = {"backend": backend, "causal": causal, "direction": direction}
        times = [predict(sized(2**k, **options), h200).ms for k in range(8, 15)]
        assert times == sorted(times)
        # At long sequences the work is quadratic.
        assert 3.4 < times[-1] / times[-2] < 4.4
        small, large = (predict(replace(CASE, **options, batch=b), h200) for b in (1, 16))
        assert small.ms < large.ms
        assert small.peak_memory_bytes < large.peak_memory_bytes
        forward = replace(CASE, **options | {"direction": "forward"})
        assert predict(forward, h200).ms <= predict(replace(CASE, **options), h200).ms


def test_a_prediction_lies_in_its_interval_and_says_what_the_time_consists_of(h200):
    found = predict(replace(CASE, seqlen=1024), h200)
    assert found.low_ms < found.ms < found.high_ms
    assert "matrix products" in found.because
    assert "cases calibrated" in found.because
    # Parts that overlap add up to more than the whole.
    assert sum(int(share) for share in re.findall(r"(\d+)%", found.because)) > 102
    assert "partly at once" in found.because


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 96}, "head_dim 96 is not calibrated"),
        ({"dtype": "float16"}, "float16 forward is not calibrated"),
        ({"backend": "fa2"}, "fa2 bfloat16 forward is not calibrated"),
        ({"seqlen": 100_000, "kv_seqlen": 100_000}, "seqlen 100000 is too far"),
        ({"seqlen": 1, "kv_seqlen": 8192}, "seqlen 1 is too far"),
    ],
)
def test_what_was_not_calibrated_is_refused(h200, change, message):
    with pytest.raises(OutOfRangeError, match=message):
        predict(replace(CASE, **change), h200)


# --- devices known by specification -------------------------------------------------------------


def test_a_specified_gpu_reaches_the_same_share_of_its_specification(h200):
    like = h200.device
    h100 = device_from_specification("H100 PCIe", like)
    assert h100.specified
    share = like.matmul_tflops["bfloat16"] / 989.5
    assert h100.matmul_tflops["bfloat16"] / 756 == pytest.approx(share)
    assert h100.copy_gb_s / 2039 == pytest.approx(like.copy_gb_s / 4800)


def test_predictions_from_a_specification_say_so_and_are_less_certain(h200):
    here, same, near, far = (
        predict(CASE, model)
        for model in (h200, *(transfer(h200, n) for n in ("H200", "H100 PCIe", "A100 SXM 80 GB")))
    )
    assert not here.from_specification
    assert near.from_specification
    assert "by specification alone" in near.because
    widths = [found.high_ms / found.low_ms for found in (here, near, far)]
    assert widths == sorted(widths)
    assert same.high_ms / same.low_ms == pytest.approx(widths[0])
    assert here.ms < near.ms < far.ms


def test_flash_attn_2_on_an_a100_lies_inside_the_interval_from_the_h200(models):
    # FlashAttention-2 paper, abstract: 50% to 73% of an A100's peak of 312 TFLOP/s.
    model = transfer(models["peers-h200"][0], "A100 SXM 80 GB")
    case = Case("sdpa_flash", 8192, 2, 16, 16, 128, "bfloat16")
    found = predict(case, model)
    low, high = (case.flops() / 1e9 / ms for ms in (found.high_ms, found.low_ms))
    assert low < 0.73 * 312
    assert high > 0.50 * 312


def test_backends_that_need_a_newer_gpu_are_left_out_and_unknown_gpus_refused(h200):
    a100 = transfer(h200, "A100 SXM 80 GB")
    assert "9.0" in a100.left_out["fa4"]
    assert "fa4" not in a100.backends("bfloat16", "forward")
    assert transfer(h200, "T4").backends("bfloat16", "forward") == []
    with pytest.raises(ValueError, match="A100 SXM 80 GB"):
        transfer(h200, "A900")
    with pytest.raises(ValueError, match="nothing to compare it with"):
        transfer(replace(h200, device=THREAD), "H200")
