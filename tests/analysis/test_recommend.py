"""Which backend for a workload: the choice and its reasons, on recorded calibrations."""

from dataclasses import replace

import pytest

from labsupport.analysis.predictor import OutOfRangeError, calibrate_run, predict, transfer
from labsupport.analysis.recommend import main, recommend
from labsupport.profiling.cases import Case

WORKLOAD = Case("", 8192, batch=4, heads=16, dtype="bfloat16")


@pytest.fixture(scope="module")
def h200():
    return calibrate_run("attention-h200")[0]


def test_the_choice_is_the_fastest_predicted_and_the_next_is_named(h200):
    found = recommend(WORKLOAD, h200)
    times = [prediction.ms for _, prediction in found.ranking]
    assert times == sorted(times)
    assert found.prediction == predict(replace(WORKLOAD, backend=found.backend), h200)
    assert f"Next: {found.ranking[1][0]}" in found.because
    assert found.backend in found.because


def test_at_long_sequences_the_choice_is_what_was_measured_to_be_the_fastest(h200):
    assert recommend(WORKLOAD, h200).backend == "fa4"
    assert recommend(replace(WORKLOAD, direction="forward+backward"), h200).backend == "fa4"


def test_a_backend_that_does_not_fit_is_out_and_the_reason_is_its_need(h200):
    found = recommend(WORKLOAD, h200, memory_gib=4)
    assert "standard" in found.excluded
    assert "there are 4.0 GiB" in found.excluded["standard"]
    assert "standard" not in recommend(WORKLOAD, h200).excluded


def test_backends_within_the_uncertainty_are_named_to_be_measured(h200):
    found = recommend(WORKLOAD, h200)
    for name, prediction in found.ranking[1:]:
        assert (name in found.close) == (prediction.ms <= found.prediction.high_ms)


def test_grouped_heads_exclude_what_cannot_do_them(h200):
    found = recommend(replace(WORKLOAD, kv_heads=4), h200)
    assert "grouped" in found.excluded["sdpa_efficient"]


def test_on_a_specified_gpu_it_says_that_nothing_was_measured_and_who_is_too_new(h200):
    found = recommend(WORKLOAD, transfer(h200, "A100 SXM 80 GB"))
    assert "by specification only" in found.because
    assert "Not fa4: needs compute capability 9.0" in found.because


def test_when_nobody_is_left_every_reason_is_given(h200):
    with pytest.raises(OutOfRangeError, match="sdpa_flash: head_dim 80"):
        recommend(replace(WORKLOAD, head_dim=80), h200)
    with pytest.raises(OutOfRangeError, match="none is calibrated"):
        recommend(replace(WORKLOAD, dtype="float32"), h200)


def test_the_command_prints_the_choice(capsys):
    main(["--seqlen", "4096", "--batch", "4", "--causal", "--gpu", "H100 SXM"])
    assert "on H100 SXM" in capsys.readouterr().out


def test_the_command_refuses_an_unknown_gpu(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--seqlen", "4096", "--gpu", "A900"])
    assert stopped.value.code == 2
    assert "hardware.csv" in capsys.readouterr().err
