"""Has a call become slower? The rule, on values; and its processes."""

import math

import pytest

from labsupport.profiling import baseline
from labsupport.profiling.baseline import (
    Baseline,
    Job,
    check_baseline,
    in_fresh_process,
    judge,
    measure,
    plan,
    read_baseline,
    write_baseline,
)
from labsupport.profiling.cases import Case
from labsupport.profiling.runs import load_run

JOB = Job(Case("sdpa_flash", 64), "cpu", 256, 1, 11)
STEADY = [0.001 * (i % 5) for i in range(10)]
BASELINE = Baseline(JOB, STEADY, [1.0] * 10, {"device": "x"})


def slowed(by, ratios=STEADY):
    return [ratio + math.log1p(by) for ratio in ratios]


def test_a_program_is_judged_by_its_change_and_the_machines():
    for slower, machine, word in (
        (0.00, 0.00, "unchanged"),
        (0.04, 0.00, "unchanged"),
        (0.06, 0.00, "slower"),
        (-0.30, 0.00, "unchanged"),  # faster is no alarm
        (0.00, 0.05, "unchanged"),
        (0.10, -0.05, "slower"),
        (0.08, 0.12, "cannot tell"),  # the machine has changed more than the program
        (0.00, 0.12, "cannot tell"),
        (0.30, 0.12, "slower"),
    ):
        verdict = judge(STEADY, slowed(slower), math.log1p(machine))
        assert verdict.word == word, (slower, machine)
        assert (verdict.change, verdict.machine) == pytest.approx((slower, machine))


def test_the_tolerance_is_the_border_and_one_disturbed_process_changes_nothing():
    assert judge(STEADY, slowed(0.06), tolerance=0.08).word == "unchanged"
    disturbed = [*STEADY[:9], 3.0]
    assert judge(disturbed, STEADY).word == judge(STEADY, disturbed).word == "unchanged"
    assert judge(STEADY, [-0.3, -0.1, 0.08, 0.25, 0.4] * 2).word == "cannot tell"


def test_on_recorded_noise_alarms_are_rare_and_slowdowns_are_caught():
    run = load_run("noise-cpu")
    rows = run[run["case"] == "default"]
    rows = rows.assign(ratio=(rows.case_ms / rows.reference_ms).map(math.log))
    each = rows.groupby("process").ratio.median().tolist()
    windows = [each[i : i + 10] for i in range(0, len(each) - 9, 10)]
    for slower, word in ((0.0, "unchanged"), (0.10, "slower")):
        words = [judge(a, slowed(slower, b)).word for a in windows for b in windows if a is not b]
        assert words.count(word) >= 0.95 * len(words)


def test_a_baseline_comes_back_from_its_file_and_gives_no_verdict_elsewhere(tmp_path):
    path = tmp_path / "flash.json"
    write_baseline(BASELINE, path)
    assert read_baseline(path) == BASELINE
    with pytest.raises(ValueError, match="the baseline is of x, and this is"):
        check_baseline(BASELINE, 0.05, print)
    for text in ("{}", "not JSON", "[1]"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"flash\.json is no baseline"):
            read_baseline(path)


def test_a_plan_is_measured_in_pairs_here_and_in_a_fresh_process(monkeypatch):
    monkeypatch.setattr(baseline, "SECONDS", 0.02)
    job = plan(Case("sdpa_flash", 64, direction="forward+backward"), "cpu")
    assert job.products >= 1
    for planned, run in ((job, measure), (JOB, in_fresh_process)):
        pairs = run(planned)
        assert len(pairs) == planned.pairs >= 11
        assert min(ms for pair in pairs for ms in pair) > 0
