"""Which backend for a workload: the choice and its reasons, on recorded calibrations."""

from dataclasses import replace

import pytest

from labsupport.analysis.predictor import OutOfRangeError, calibrate_run, predict, transfer
from labsupport.analysis.recommend import main, recommend, refuse_unsupported
from labsupport.profiling.cases import Case

WORKLOAD = Case("", 8192, batch=4, heads=16, dtype="bfloat16")


@pytest.fixture(scope="module")
def h200():
    return calibrate_run("attention-h200")[0]


def test_the_choice_is_the_fastest_predicted_and_those_within_its_interval_are_named(h200):
    found = recommend(WORKLOAD, h200)
    times = [prediction.ms for _, prediction in found.ranking]
    assert times == sorted(times)
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
    assert "by specification only" in a100
    assert "Not fa4: needs compute capability 9.0" in a100


def test_limits_of_a_backend_are_refused():
    largest = replace(WORKLOAD, backend="fa2", head_dim=256)
    refuse_unsupported(largest)
    with pytest.raises(OutOfRangeError, match="up to 256, not 264"):
        refuse_unsupported(replace(largest, head_dim=264))
    with pytest.raises(OutOfRangeError, match="multiple of 8"):
        refuse_unsupported(replace(WORKLOAD, backend="sdpa_cudnn", head_dim=20))


def test_when_no_backend_is_left_every_reason_is_given(h200):
    with pytest.raises(OutOfRangeError, match="sdpa_flash: head_dim 80"):
        recommend(replace(WORKLOAD, head_dim=80), h200)
    with pytest.raises(OutOfRangeError, match="none is calibrated"):
        recommend(replace(WORKLOAD, dtype="float32"), h200)


def test_the_command_prints_the_choice_and_refuses_an_unknown_gpu(capsys):
    workload = ["--run", "calibration-cpu", "--dtype", "float32", "--seqlen", "512"]
    main([*workload, "--heads", "4", "--causal"])
    assert "the fastest predicted" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main([*workload, "--gpu", "A900"])
    assert stopped.value.code == 2
    assert "hardware.csv" in capsys.readouterr().err
