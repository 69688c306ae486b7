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
from labsupport.analysis.predictor.evaluate import (
    choices,
    errors_by,
    refused_cases,
    with_predictions,
)
from labsupport.analysis.predictor.split import SHAPE, SPLITS, divide, recorded
from labsupport.analysis.predictor.work import features, fused_bytes, makespan
from labsupport.profiling.cases import Case

H200_RUNS = [name for name in SPLITS if "h200" in name]
CPU_RUN = "calibration-cpu"
TARGETS = dict.fromkeys(H200_RUNS, 0.1) | {CPU_RUN: 0.20}
CASE = Case("sdpa_cudnn", 2048, batch=4, heads=16, dtype="bfloat16")


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
def test_no_shape_is_on_both_sides_and_every_measurement_is_on_one(name):
    table = recorded(name)
    seen, held_out = divide(table, SPLITS[name])
    shapes = [set(side[list(SHAPE)].itertuples(index=False)) for side in (seen, held_out)]
    assert shapes[0]
    assert not shapes[0] & shapes[1]
    assert len(seen) + len(held_out) == (table.status == "ok").sum()


@pytest.mark.parametrize("name", SPLITS)
def test_the_calibration_does_not_read_the_held_out_times(name, models):
    seen, _ = divide(recorded(name), SPLITS[name])
    device = device_of_run(name.split(":")[0])
    assert calibrate(seen.case, seen.ms, device, spreads=seen.spread) == models[name][0]


@pytest.mark.parametrize("name", SPLITS)
def test_times_of_held_out_shapes_are_predicted_within_the_target(name, tables):
    table = tables[name]
    assert len(table) >= (20 if name == CPU_RUN else 40)
    assert table.error.abs().mean() <= TARGETS[name]


@pytest.mark.parametrize("name", ["attention-h200", CPU_RUN])
def test_memory_of_held_out_shapes_is_predicted_within_5_percent(name, tables):
    assert tables[name].memory_error.notna().all()
    assert tables[name].memory_error.abs().mean() <= 0.05


@pytest.mark.parametrize("names", [H200_RUNS, [CPU_RUN]])
def test_19_of_20_choices_are_within_5_percent_of_the_best(tables, names):
    cost = np.concatenate([choices(tables[name]).times_best for name in names])
    assert len(cost) >= 20
    assert (cost <= 1.05).mean() >= 0.95


def test_most_measurements_lie_inside_the_intervals(tables):
    for table in tables.values():
        assert table.covered.mean() >= 0.85


def test_the_command_prints_errors_by_backend_and_the_choices(capsys):
    main(["--run", "attention-h200", "--weights", "--cases"])
    text = capsys.readouterr().out
    assert "92 cases calibrate, 96 are tested" in text
    assert "time_mape" in text
    assert "Chosen within 5% of the best" in text


def test_cases_too_far_from_the_calibration_are_refused_and_not_counted(models):
    model, held = models["attention-h200"]
    rows = held.head(2).copy()
    rows["case"] = [rows.case.iloc[0], sized(10**6)]
    refused = refused_cases(rows, model)
    assert list(refused.index) == [rows.index[1]]
    assert "too far" in refused.refusal.iloc[0]
    assert len(with_predictions(rows, model)) == 1


def test_the_row_of_all_errors_is_their_mean(tables):
    table = tables["attention-h200"]
    last = errors_by(table).iloc[-1]
    assert last.backend == "all"
    assert last.time_mape == pytest.approx(100 * table.error.abs().mean())


# --- work, counted ------------------------------------------------------------------------------


def test_one_piece_more_than_multiprocessors_doubles_the_time():
    assert makespan((1,), 132, 132) == 1
    assert makespan((1,), 133, 132) == 2


def test_free_units_take_the_longest_piece_first():
    # 4 + 3 + 2 + 1 on two units: 4 and 1 beside 3 and 2.
    assert makespan((1, 2, 3, 4), 1, 2) == 5
    assert makespan((8, 1, 1), 1, 3) == 8


def test_many_pieces_leave_no_wave_half_empty():
    assert makespan((3, 5), 10_000, 132) == pytest.approx(80_000 / 132)


def test_a_causal_mask_skips_the_tiles_above_the_diagonal():
    one = Device("a thread", "cpu", 1, 10.0, {"float32": 1e-3}, 1.0)
    case = Case("sdpa_efficient", 256, heads=1)
    whole, half = (features(replace(case, causal=c), one)["matmul"] for c in (False, True))
    # Tiles of 64 x 64: 10 of 16 hold a visible score.
    assert half / whole == pytest.approx(10 / 16)
    # Two products of 2 FLOPs for each score and each of 64 columns, at 10^9 FLOPs a second.
    assert whole == pytest.approx(2 * 2 * 64 * 256**2 / 1e9 * 1e3)


def test_an_implementation_that_stores_the_scores_computes_the_hidden_ones_too():
    one = Device("a thread", "cpu", 1, 10.0, {"float32": 1e-3}, 1.0)
    case = Case("standard", 256, heads=1)
    plain, causal = (features(replace(case, causal=c), one) for c in (False, True))
    assert plain["matmul"] == causal["matmul"]
    assert plain["mask"] == 0 < causal["mask"]


def test_fused_bytes_of_a_forward_are_its_inputs_and_its_output():
    case = Case("sdpa_flash", 100, batch=2, heads=8, kv_heads=2, head_dim=64, dtype="bfloat16")
    q = 2 * 100 * 8 * 64 * 2
    assert fused_bytes(case) == q + 2 * q / 4 + q


# --- the fit ------------------------------------------------------------------------------------


def test_non_negative_least_squares_finds_known_weights():
    generator = np.random.default_rng(0)
    a = generator.random((30, 4))
    x = np.array([0.5, 0.0, 2.0, 0.0])
    assert non_negative_least_squares(a, a @ x) == pytest.approx(x)


def test_non_negative_least_squares_sets_a_weight_to_zero_that_would_be_negative():
    a = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    x = non_negative_least_squares(a, np.array([1.0, -1.0, 0.5]))
    assert x == pytest.approx([0.75, 0.0])


def test_weights_that_made_the_times_are_found_again():
    device = device_of_run("attention-h200")
    cases = [
        sized(n, causal=causal, head_dim=d)
        for n in (512, 1024, 2048, 8192)
        for causal in (False, True)
        for d in (64, 128)
    ]
    made = {"launch": 0.02, "matmul": 1.4, "exp": 0.8, "edge": 0.5, "memory": 1.2}

    def ms(case):
        found = features(case, device)
        work = sum(made[name] * found[name] for name in made if name != "launch")
        return math.hypot(made["launch"], work)  # starting and work overlap

    model = calibrate(cases, map(ms, cases), device)
    other = sized(4096, causal=True)
    assert predict(other, model).ms == pytest.approx(ms(other), rel=0.02)


def test_a_noisy_measurement_counts_less():
    device = device_of_run("attention-h200")
    cases = [sized(n) for n in (512, 1024, 2048, 4096, 8192)]
    times = [features(case, device)["matmul"] * 1.5 for case in cases]
    times[0] *= 4  # an odd one
    odd = [1.0, 0, 0, 0, 0]
    target = sized(512)
    trusted, doubted = (
        predict(target, calibrate(cases, times, device, spreads=s)).ms for s in (None, odd)
    )
    assert abs(doubted - times[0] / 4) < abs(trusted - times[0] / 4)


def test_too_few_measurements_are_refused():
    device = device_of_run("attention-h200")
    with pytest.raises(ValueError, match="too few"):
        calibrate([CASE, sized(4096)], [1.0, 2.0], device)
    with pytest.raises(ValueError, match="nothing to calibrate on"):
        calibrate([], [], device)


# --- predictions --------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
def test_more_work_takes_longer_on_every_backend(h200, causal, direction):
    for backend in h200.backends("bfloat16", direction):
        options = {"backend": backend, "causal": causal, "direction": direction}
        case = replace(CASE, **options)
        times = [predict(sized(2**k, **options), h200).ms for k in range(8, 15)]
        assert times == sorted(times)
        # At long sequences the work is quadratic.
        assert 3.4 < times[-1] / times[-2] < 4.4
        batches = [predict(replace(case, batch=b), h200) for b in (1, 4, 16)]
        assert batches[0].ms < batches[1].ms < batches[2].ms
        assert batches[0].peak_memory_bytes < batches[2].peak_memory_bytes


def test_a_backward_takes_longer_than_its_forward_alone(h200):
    for backend in h200.backends("bfloat16", "forward"):
        both = replace(CASE, backend=backend, direction="forward+backward")
        assert predict(both, h200).ms > predict(replace(CASE, backend=backend), h200).ms


def test_an_interval_holds_its_prediction_and_says_what_the_time_consists_of(h200):
    found = predict(CASE, h200)
    assert found.low_ms < found.ms < found.high_ms
    assert "matrix products" in found.because
    assert "cases calibrated" in found.because


def test_parts_that_overlap_are_said_to(h200):
    """They add up to more than the whole."""
    short = predict(replace(CASE, seqlen=1024), h200).because
    parts = [int(share) for share in re.findall(r"(\d+)%", short)]
    assert sum(parts) > 102
    assert "partly at once" in short


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 96}, "head_dim 96 is not calibrated"),
        ({"dtype": "float16"}, "float16 forward is not calibrated"),
        ({"backend": "fa2"}, "fa2 bfloat16 forward is not calibrated"),
        ({"seqlen": 100_000}, "seqlen 100000 is too far"),
        ({"seqlen": 1, "kv_seqlen": 8192}, "seqlen 1 is too far"),
    ],
)
def test_what_was_not_calibrated_is_refused(h200, change, message):
    lengths = {"kv_seqlen": change.get("seqlen", CASE.seqlen)}
    with pytest.raises(OutOfRangeError, match=message):
        predict(replace(CASE, **lengths | change), h200)


# --- devices known by specification -------------------------------------------------------------


def test_a_specified_gpu_reaches_the_same_share_of_its_specification(h200):
    like = h200.device
    h100 = device_from_specification("H100 PCIe", like)
    assert h100.specified
    assert h100.matmul_tflops["bfloat16"] / 756 == pytest.approx(
        like.matmul_tflops["bfloat16"] / 989.5
    )
    assert h100.copy_gb_s / 2039 == pytest.approx(like.copy_gb_s / 4800)


def test_predictions_from_a_specification_say_so_and_are_less_certain(h200):
    measured, near, far = (
        predict(CASE, model)
        for model in (h200, transfer(h200, "H100 PCIe"), transfer(h200, "A100 SXM 80 GB"))
    )
    assert not measured.from_specification
    assert near.from_specification
    assert "by specification alone" in near.because
    widths = [found.high_ms / found.low_ms for found in (measured, near, far)]
    assert widths == sorted(widths)
    assert measured.ms < near.ms < far.ms


def test_flash_attn_2_on_an_a100_lies_inside_the_interval_from_the_h200(models):
    # FlashAttention-2 paper, abstract: 50% to 73% of an A100's peak of 312 TFLOP/s.
    model = transfer(models["peers-h200"][0], "A100 SXM 80 GB")
    case = Case("sdpa_flash", 8192, 2, 16, 16, 128, "bfloat16")
    found = predict(case, model)
    low, high = (case.flops() / 1e9 / ms for ms in (found.high_ms, found.low_ms))
    assert low < 0.73 * 312
    assert high > 0.50 * 312


def test_backends_that_need_a_newer_gpu_are_left_out_with_the_reason(h200):
    a100 = transfer(h200, "A100 SXM 80 GB")
    assert "9.0" in a100.left_out["fa4"]
    assert "fa4" not in a100.backends("bfloat16", "forward")
    assert transfer(h200, "T4").backends("bfloat16", "forward") == []


def test_an_unknown_gpu_is_refused_with_those_that_are_known(h200):
    with pytest.raises(ValueError, match="A100 SXM 80 GB"):
        transfer(h200, "A900")
