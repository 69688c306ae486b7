"""Judging and naming mistakes; and the references themselves, against the lab's measurements."""

import random

import jupytext
import numpy as np
import pytest
import torch

from labsupport import checks
from labsupport.analysis.traffic import count
from labsupport.checks import (
    ex_1_1_textbook_attention,
    ex_4_1_cost,
    ex_4_2_traffic,
    ex_4_4_predict,
    ex_4_5_choose,
    verdict,
)
from labsupport.checks.verdict import Mistake, judge, mistakes, mutant
from labsupport.paths import notebooks_dir
from labsupport.profiling import measure_peak_memory
from labsupport.profiling.grids import Case, case_of, passes_of
from labsupport.profiling.runs import load_run
from labsupport.training import Decoder, DecoderConfig, MemoryOptions
from tests.checks.solutions import diagnosis, function, solution_source


def test_a_table_of_mistakes_is_read_entry_by_entry():
    table = r"""
One line.
    a -> b
Two lines, joined by
a space; two edits.
    c + d ->
    e -> f\n    g
"""
    expected = (
        Mistake(("a", "b"), "One line."),
        Mistake(("c + d", "", "e", "f\n    g"), "Two lines, joined by a space; two edits."),
    )
    assert mistakes(table) == expected


def test_an_edit_of_a_text_that_is_not_there_is_an_error():
    with pytest.raises(LookupError, match="does not contain 'product'"):
        mutant(ex_1_1_textbook_attention.textbook_attention, ("product", ""))


def test_a_message_says_where_a_result_goes_wrong():
    right, nan, inf = torch.zeros(2, 3), torch.nan, torch.inf
    for wrong, said in (
        (torch.zeros(2), r"x has shape \(2,\), but \(2, 3\) was expected"),
        (torch.zeros(2, 3).half(), "x has dtype torch.float16"),
        (torch.tensor([[0, 0, nan], [nan, 0, 0]]), r"2 NaN, the first at index \(0, 2\)"),
        (torch.tensor([[0, 0, 0], [0, inf, 0]]), r"1 infinities, the first at index \(1, 1\)"),
        (torch.tensor([[0, 2, 0], [0, 0, -3.0]]), r"2 of 6 .* index \(0, 1\): 2 .* error 3,"),
    ):
        with pytest.raises(checks.CheckFailed, match=said):
            judge("x", wrong, right, allowed=0.1, dtype=torch.float32)
    judge("x", torch.full((2,), inf), torch.full((2,), inf), allowed=0.1)
    judge("x", right + 0.09, right, allowed=0.1)
    with pytest.raises(checks.CheckFailed):
        judge("x", torch.full((2,), -inf), torch.full((2,), inf), allowed=0.1)


def test_a_call_that_fails_is_named():
    def adds(a, b):
        return a + b

    said = diagnosis(verdict.call, adds, torch.ones(2), "text")
    assert "adds raised TypeError in line" in said
    assert "return a + b" in said
    assert "It was called with a: float32 (2,), b: 'text'." in said
    assert "is a `return` missing?" in diagnosis(verdict.call, lambda: None)
    parts = [(torch.ones(1),)]
    assert "number 1 in place" in diagnosis(verdict.call, lambda x: x[0][0].add_(1), parts)


def test_a_line_that_raises_gets_a_remark():
    def turned(k):
        return k + k.T

    def row_of_numbers(s):
        return s - s.amax(-1)

    for student, said in ((turned, "`.mT` swaps the last two"), (row_of_numbers, "keepdim=True")):
        assert said in diagnosis(verdict.call, student, torch.ones(2, 3, 4))


def test_a_failure_shows_lines_that_fit_and_no_traceback_in_a_notebook():
    reason = "\n".join([" ".join(["seventeen"] * 30), "It was called with two tensors."])
    shown = checks.CheckFailed(reason)._render_traceback_()
    assert max(map(len, shown)) <= 100
    assert " ".join(shown).split() == f"Check failed: {reason}".split()
    assert shown[-1] == "It was called with two tensors."


def test_a_students_function_is_used_only_when_it_passes(capsys):
    good = function(solution_source("ex-1-1-textbook-attention"), "textbook_attention")
    bad = mutant(
        ex_1_1_textbook_attention.textbook_attention, ex_1_1_textbook_attention.MISTAKES[0].edit
    )
    ours, check = object(), checks.check_textbook_values
    assert checks.solution_or_reference(good, ours, check) is good
    assert checks.solution_or_reference(bad, ours, check) is ours
    said = capsys.readouterr().out
    assert "Using your textbook_attention" in said
    assert "does not pass its checks yet" in said


def test_predictions_are_compared_with_measurements(capsys):
    for predicted, measured, said in (
        (10, 10.0, "(exact)"),
        (10, 13.0, "(within a third)"),
        (100, 10.0, "factor of 10.0"),
        (None, 10.0, "no prediction"),
        ("soon", 10.0, "no prediction"),
        (0, 0.5, "you predicted 0 ms, it is 0.5 ms (0.5 ms off)"),
        ("2,000 ms", 2784.6, "you predicted 2,000 ms, it is 2,785 ms (off by a factor of 1.4)"),
    ):
        checks.compare_prediction("Time", predicted, measured, "ms")
        assert said in capsys.readouterr().out
    for share, said in ((-1.04, "-1.04 was measured, which is impossible"), (0.4, "(exact)")):
        checks.compare_prediction("Share", 0.4, share, possible=(0, 1))
        assert said in capsys.readouterr().out
    checks.compare_prediction("Share", "40%", 0.4, possible=(0, 1))
    assert "it is 0.4 (it lies between 0 and 1)" in capsys.readouterr().out


# --- the references -------------------------------------------------------------------------------


def test_counted_traffic_is_what_a_memory_that_counts_sees():
    for case, causal in zip(ex_4_2_traffic._sizes(0)[:2], (False, True), strict=True):
        n, d = case["seqlen"], case["head_dim"]
        q = torch.randn(n, d, dtype=torch.float64)
        blocks = {"block_q": case["block_q"], "block_k": case["block_k"]}

        def seen(algorithm, q=q, blocks=blocks, **options):
            run = count(algorithm, q, q, q, **blocks, **options)
            return sum(run.read.values()), sum(run.written.values())

        for outside, version in (("queries", "version2"), ("keys", "version1")):
            expected = seen(version, causal=causal)
            assert (
                checks.ex_4_2_traffic.tiled_traffic(**case, outside=outside, causal=causal)
                == expected
            )
        assert checks.ex_4_2_traffic.textbook_traffic(n, d, case["block_q"]) == seen("standard")


def test_the_cost_is_counted_as_in_the_labs_measurements():
    for shape in ex_4_1_cost._shapes(3):
        options = {**shape, "dtype": str(shape["dtype"]).removeprefix("torch.")}
        options["seqlen"], options["kv_seqlen"] = options.pop("seqlen_q"), options.pop("seqlen_k")
        backward = options.pop("backward")
        one = passes_of(Case(backend="", direction="forward+backward", **options))[backward]
        assert checks.ex_4_1_cost.attention_cost(**shape) == (one.flops, one.bytes)


def test_the_fit_is_the_minimum_of_the_relative_errors():
    flops, ms = ex_4_4_predict._measured(np.random.default_rng(0), rows=12, noise=0.1)
    start, rate = checks.ex_4_4_predict.fit_time(flops, ms)

    def loss(start, rate):
        return np.square(checks.ex_4_4_predict.predict_time(flops, start, rate) / ms - 1).sum()

    for by in (0.99, 1.01):
        assert loss(start, rate) < min(loss(start * by, rate), loss(start, rate * by))


def test_two_numbers_predict_recorded_times_on_an_h200():
    """Lengths that calibrated nothing, of forward passes without a mask: within a tenth."""
    run = load_run("attention-h200")
    table = run[(run.backend == "fa4") & (run.direction == "forward") & ~run.causal].copy()
    table["flops"] = [case_of(row).flops() for row in table.to_dict("records")]
    table["held_out"] = ~table.seqlen.isin([512, 4096, 16_384])
    start, rate, error = checks.ex_4_4_predict.held_out_error(table)
    assert 0 < start < 0.1
    assert 300 < rate < 990
    assert error < 0.1


@pytest.mark.parametrize(
    ("vocab", "stores_scores", "checkpoint", "chunk"),
    [(257, False, True, 128), (257, True, True, 128), (8000, False, False, None)],
)
def test_planned_bytes_come_within_a_tenth_of_a_measured_step(
    vocab, stores_scores, checkpoint, chunk
):
    """One case for each moment that may be the highest."""
    shape = {"width": 128, "layers": 3, "heads": 4}
    backend = "standard" if stores_scores else "sdpa_flash"
    savings = MemoryOptions(attention=backend, checkpoint=checkpoint, loss_chunk=chunk)
    model = Decoder(DecoderConfig(vocab_size=vocab, **shape), savings)
    for parameter in model.parameters():  # the rules count none of the weights' gradients
        parameter.grad = torch.zeros_like(parameter)
    tokens = torch.randint(vocab, (1, 512), generator=torch.Generator().manual_seed(0))
    measured = measure_peak_memory(lambda: model(tokens, tokens).backward(), device="cpu")
    (counted,) = (
        cell.source
        for cell in jupytext.read(notebooks_dir() / "03-Long_Sequence_Training.py").cells
        if cell.source.startswith("def kept_bytes")
    )
    predicted = function(counted, "kept_bytes")(
        512, *shape.values(), 512, vocab, stores_scores, checkpoint, chunk
    )
    assert predicted == pytest.approx(measured.peak_bytes, rel=0.1)


def test_the_tables_of_times_tell_all_mistakes_apart_with_another_seed():
    for kinds, some in (
        ({}, ex_4_5_choose.LIMIT_MISTAKES),
        ({"close": True}, ex_4_5_choose.TIE_MISTAKES + ex_4_5_choose.LIMIT_MISTAKES),
        ({"sources": True}, ex_4_5_choose.SOURCE_MISTAKES + ex_4_5_choose.LIMIT_MISTAKES),
    ):
        workloads = ex_4_5_choose.tables(5, **kinds)
        choices = [ex_4_5_choose.choice, *(mutant(ex_4_5_choose.choice, one.edit) for one in some)]
        answers = {tuple(choice(*one) for one in workloads) for choice in choices}
        assert len(answers) == len(some) + 1


def test_no_table_of_times_hangs_on_rounding():
    """Times of rows that may run are never within a thousandth of the 5%."""
    rng = random.Random(0)
    for _ in range(200):
        rows, _, dtype = ex_4_5_choose._workload(rng, True, False)
        times = [row["ms"] for row in rows if row["dtype"] == dtype]
        assert not any(1.049 < a / b < 1.051 for a in times for b in times)
