import math
import random
import statistics
from dataclasses import replace

import pytest

from benchmarks import baseline_power
from benchmarks.__main__ import main
from benchmarks.baseline_power import interval, processes_of, simulate
from labsupport.profiling.baseline import (
    FEWEST,
    FEWEST_SAVED,
    MOST,
    MOST_SAVED,
    Baseline,
    NotComparableError,
    Verdict,
    check_baseline,
    decide,
    enough,
    judge,
    make_baseline,
    read_baseline,
    trimmed_mean,
    write_baseline,
)
from labsupport.profiling.baseline_worker import (
    Job,
    Pairs,
    Reference,
    call_of,
    in_fresh_process,
    plan,
)
from labsupport.profiling.cases import Case
from labsupport.profiling.hardware import cpu_name
from labsupport.profiling.runs import load_run

STEADY = [0.001 * (i % 5) for i in range(10)]
JOB = Job(Case("sdpa_flash", 64), "cpu", Reference(256, 1), 11)


def shifted(by: float, values=tuple(STEADY)):
    return [value + math.log1p(by) for value in values]


def test_an_unchanged_program_is_unchanged_and_one_a_tenth_slower_is_slower():
    assert judge(STEADY, STEADY).word == "unchanged"
    assert judge(STEADY, shifted(0.10)).word == "slower"
    assert judge(STEADY, shifted(0.10)).change == pytest.approx(0.10)


def test_the_tolerance_is_the_border():
    assert judge(STEADY, shifted(0.04)).word == "unchanged"
    assert judge(STEADY, shifted(0.06)).word == "slower"
    assert judge(STEADY, shifted(0.06), 0.08).word == "unchanged"


def test_a_faster_program_is_no_alarm():
    verdict = judge(STEADY, shifted(-0.30))
    assert (verdict.word, verdict.exit_status) == ("unchanged", 0)


def test_processes_that_contradict_each_other_are_no_answer():
    assert judge(STEADY, [-0.3, -0.1, 0.08, 0.25, 0.4]).word == "cannot tell"


def test_one_process_that_met_a_disturbance_changes_nothing():
    disturbed = [*STEADY[:9], 3.0]
    assert judge(disturbed, STEADY).word == "unchanged"
    assert judge(STEADY, disturbed).word == "unchanged"


def test_the_trimmed_mean_and_its_variance_are_those_of_yuen():
    # A fifth of five is one at each end: the mean of 2, 3, 4, and of the Winsorized 2 2 3 4 4 the
    # sum of squares 4, over 3 * 2.
    mean, variance = trimmed_mean([100.0, 3.0, 2.0, 4.0, -50.0])
    assert mean == 3.0
    assert variance == pytest.approx(4 / 6)


def test_fewer_than_five_processes_are_refused():
    with pytest.raises(ValueError, match="4 processes are too few"):
        judge(STEADY, STEADY[:4])


@pytest.mark.parametrize("tolerance", [0.0, -0.05, 5.0])
def test_a_tolerance_that_is_no_fraction_is_refused(tolerance):
    with pytest.raises(ValueError, match=r"0\.05"):
        judge(STEADY, STEADY, tolerance)


@pytest.mark.parametrize(("word", "status"), [("unchanged", 0), ("slower", 1), ("cannot tell", 3)])
def test_each_word_has_its_exit_status(word, status):
    assert Verdict(word, 0.0, 0.0, 0.0, 5).exit_status == status


def saved(reference_ms=1.0, **other):
    """A baseline of ten steady processes."""
    values = {"job": JOB, "log_ratios": tuple(STEADY), "case_ms": (1.0,) * 10}
    return Baseline(**(values | other), reference_ms=(reference_ms,) * 10)


def processes(log_ratios, reference_ms=1.0):
    """A function that gives one process after the other."""
    ratios = iter(log_ratios)
    return lambda: Pairs((reference_ms * math.exp(next(ratios)),), (reference_ms,))


def test_a_clear_case_takes_the_fewest_processes_and_a_hopeless_one_the_most():
    assert decide(saved(), processes(shifted(0.10))).processes == FEWEST
    verdict = decide(saved(), processes((-1.0) ** i for i in range(100)))
    assert (verdict.word, verdict.processes) == ("cannot tell", MOST)


def test_a_doubtful_case_is_decided_by_more_processes():
    verdict = decide(saved(), processes([-0.08, -0.05, 0.0, 0.05, 0.08, *[0.0] * 20]))
    assert verdict.word == "unchanged"
    assert FEWEST < verdict.processes < MOST


@pytest.mark.parametrize(
    ("slowdown", "machine", "word"),
    [
        (0.00, 0.05, "unchanged"),
        (0.10, 0.05, "slower"),
        (0.10, -0.05, "slower"),
        (0.08, 0.12, "cannot tell"),
        (0.00, 0.12, "cannot tell"),
        (0.30, 0.12, "slower"),
    ],
)
def test_where_the_machine_changed_the_program_must_have_changed_more(slowdown, machine, word):
    verdict = decide(saved(), processes(shifted(slowdown) * 2, reference_ms=1 + machine))
    assert verdict.word == word
    assert verdict.machine == pytest.approx(machine)


def test_the_ratio_of_a_process_is_the_median_of_its_pairs():
    pairs = Pairs((2.0, 20.0, 400.0), (1.0, 10.0, 1.0))
    assert pairs.log_ratio == pytest.approx(math.log(2))


def test_a_machine_that_is_a_little_slower_today_is_no_alarm():
    before = saved(20.0, provenance={"device": cpu_name()})
    pairs = Pairs((21.0,) * 11, (21.0,) * 11)
    assert check_baseline(before, measure=lambda job: pairs).word == "unchanged"


def test_a_baseline_is_measured_until_it_is_known():
    case = Case("sdpa_flash", 64)
    calm = make_baseline(case, "cpu", measure=lambda job: Pairs((2.0,), (1.0,)))
    assert len(calm.log_ratios) == FEWEST_SAVED
    draw = random.Random(0)
    wild = make_baseline(case, "cpu", measure=lambda job: Pairs((draw.uniform(1, 9),), (1.0,)))
    assert len(wild.log_ratios) == MOST_SAVED
    assert not enough(wild.log_ratios)


def test_a_baseline_comes_back_from_its_file(tmp_path):
    before = saved(1.5, provenance={"device": "a machine"})
    path = tmp_path / "folder" / "flash.json"
    write_baseline(before, path)
    assert read_baseline(path) == before


def test_a_file_that_is_no_baseline_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="--save-baseline"):
        read_baseline(tmp_path / "none.json")
    path = tmp_path / "other.json"
    for text in ("{}", "not JSON", '{"format": 99}', "[1]"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"other\.json is no baseline"):
            read_baseline(path)


def test_another_machines_baseline_gives_no_verdict():
    elsewhere = saved(provenance={"device": "another machine"})
    with pytest.raises(NotComparableError, match="another machine"):
        check_baseline(elsewhere, measure=lambda job: Pairs((1.0,), (1.0,)))


def test_a_fresh_process_measures_as_many_pairs_as_it_is_asked_for():
    pairs = in_fresh_process(replace(JOB, pairs=11))
    assert len(pairs.case_ms) == len(pairs.reference_ms) == 11
    assert min(*pairs.case_ms, *pairs.reference_ms) > 0


def test_a_process_that_fails_says_why():
    with pytest.raises(RuntimeError, match=r"nothing.*unknown backend"):
        in_fresh_process(replace(JOB, case=Case("nothing", 64)))


def test_a_plan_names_a_reference_and_pairs_within_bounds():
    job = plan(Case("sdpa_flash", 64), "cpu")
    assert job.reference.size in (256, 512, 1024)
    assert job.reference.products >= 1
    assert 11 <= job.pairs <= 41


@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
def test_a_slowed_call_computes_the_last_queries_twice(direction):
    case = Case("sdpa_flash", 40, causal=True, direction=direction)
    plain, slowed = call_of(case, "cpu"), call_of(case, "cpu", extra=0.1)
    whole, again = slowed()
    first = (lambda out: out[0]) if direction == "forward+backward" else (lambda out: out)
    assert first(whole).equal(first(plain()))
    assert again[0].shape[1] == 40 if direction == "forward+backward" else again.shape[1] == 4


def test_intervals_of_shares_are_wilsons():
    # 0 of 300, the "rule of three": about 3.7 / 300 by Wilson.
    low, high = interval(0, 300)
    assert low == 0.0
    assert high == pytest.approx(1.96**2 / (300 + 1.96**2), rel=1e-3)
    low, high = interval(50, 100)
    assert (low, high) == (pytest.approx(0.4038, abs=1e-3), pytest.approx(0.5962, abs=1e-3))


def artificial(processes: int, spread: float, drift: float) -> list[Pairs]:
    """Processes whose ratio varies by `spread`, and which get slower by `drift` all in all."""
    draw = random.Random(1)
    made = []
    for i in range(processes):
        own = draw.gauss(0, spread) + drift * i / processes
        machine = [1 + draw.uniform(0, 0.1) for _ in range(11)]
        made.append(
            Pairs(tuple(m * math.exp(own + draw.gauss(0, 0.02)) for m in machine), tuple(machine))
        )
    return made


def test_the_simulation_finds_a_rule_right_on_calm_noise_and_wrong_on_drift():
    calm = artificial(40, 0.01, 0.0)
    assert simulate(calm, trials=200).words["unchanged"] == 200
    assert simulate(calm, slowdown=0.10, trials=200).words["slower"] == 200
    # A ratio that drifts by 30% from one end of the recording to the other defeats any rule.
    assert simulate(artificial(40, 0.01, 0.3), trials=200).words["slower"] > 40


def test_the_simulation_repeats_itself():
    recorded = artificial(24, 0.03, 0.0)
    assert simulate(recorded, trials=50, seed=3) == simulate(recorded, trials=50, seed=3)


def test_the_program_prints_the_rates_of_each_slowdown(capsys):
    assert main(["baseline_power", "--case", "short", "--trials", "10"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["short +0%", "short +5%", "short +10%"]
    assert all("10 trials" in line for line in lines)


def test_too_short_a_recording_is_refused():
    with pytest.raises(ValueError, match="15 recorded processes"):
        simulate(artificial(15, 0.01, 0.0))


@pytest.mark.parametrize("case", sorted(baseline_power.CASES))
def test_on_recorded_noise_alarms_are_rare_and_slowdowns_are_caught(case):
    recorded = processes_of(load_run("noise-cpu"), case)
    assert simulate(recorded, trials=400).share("slower")[0] < 0.01
    assert simulate(recorded, slowdown=0.10, trials=400).share("slower")[0] >= 0.95


def test_on_a_machine_that_others_keep_busy_a_long_call_raises_no_alarm():
    recorded = processes_of(load_run("noise-cpu-busy"), "default")
    assert simulate(recorded, trials=400).share("slower")[0] < 0.01


def test_a_changed_machine_makes_the_rule_hesitate_rather_than_alarm():
    # The same noise, judged with and without what the reference says of the machine.
    recorded = processes_of(load_run("noise-cpu-busy"), "short")
    blind = [Pairs(p.case_ms, p.reference_ms) for p in recorded]
    for i, p in enumerate(blind):
        level = statistics.median(p.reference_ms)
        blind[i] = Pairs(
            tuple(ms / level for ms in p.case_ms), tuple(ms / level for ms in p.reference_ms)
        )
    with_machine, without = (simulate(rows, trials=400) for rows in (recorded, blind))
    assert with_machine.words["slower"] < without.words["slower"] / 2
