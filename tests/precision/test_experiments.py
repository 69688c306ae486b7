"""Each experiment shows the failure that it is about, and the remedy next to it."""

import re

import torch

from labsupport.attention.registry import FLOAT_DTYPES
from labsupport.precision import experiments
from labsupport.precision.experiments import RULES, _round_tf32
from labsupport.precision.experiments.__main__ import main


def rows(table):
    return {row[table.columns[0]]: row for row in table.to_dict("records")}


def test_float16_logits_overflow_in_the_textbook_and_not_in_flash_attention():
    found = rows(experiments.float16_logits_overflow())
    textbook = found["textbook, float16"]
    assert textbook["largest score"] == float("inf")
    assert textbook["NaN in output"] == 16 * 64
    for name in set(found) - {"textbook, float16"}:
        assert found[name]["NaN in output"] == 0
    # 40 * 40 * 64, and scaled by 1/8 first
    assert found["textbook, bfloat16"]["largest score"] == 102_400
    assert found["textbook, float16, q scaled first"]["largest score"] == 12_800


def test_norm_statistics_fail_in_float16_at_both_ends_and_nowhere_in_float32():
    table = experiments.norm_statistics((1e-4, 1.0, 255.0, 300.0)).set_index(
        ["computation", "magnitude"]
    )
    by_hand = table.loc["by hand, in float16"]
    assert by_hand.loc[1e-4, "non-finite"] == 8 * 768
    assert by_hand.loc[300.0, "relative error"] == 1.0  # divided by infinity
    assert by_hand.loc[1.0, "relative error"] < 1e-3
    for other in ("by hand, statistics in float32", "F.rms_norm of float16"):
        assert (table.loc[other]["non-finite"] == 0).all()
        assert (table.loc[other]["relative error"] < 2**-11).all()


def test_a_running_sum_stops_at_two_to_the_number_of_significant_bits():
    found = rows(experiments.running_sum(4096))
    assert found["float16"]["sum"] == 2**11
    assert found["bfloat16"]["sum"] == 2**8
    assert found["float32"]["sum"] == 4096
    assert rows(experiments.running_sum(256))["bfloat16"]["sum"] == 256


def test_most_gradients_of_float16_logits_are_zero_and_none_with_the_loss_in_float32():
    found = rows(experiments.cross_entropy_dtypes(tokens=128))
    assert found["float16"]["zero gradients"] > 0.5
    assert found["float16"]["row sum"] > 0.02
    mended = found["float16, loss in float32"]
    assert mended["zero gradients"] == 0
    assert mended["row sum"] < 1e-5
    # A loss of about 12 is stored in steps of 2^-7 and 2^-4.
    assert mended["loss error"] < 1e-5
    assert 1e-4 < found["float16"]["loss error"] < found["bfloat16"]["loss error"] < 2**-4


def test_gradients_underflow_in_float16_unless_scaled_and_not_in_bfloat16():
    table = experiments.gradient_underflow()
    float16 = table[table.dtype == "float16"].set_index("loss scale")
    assert float16.loc[1.0, "relative error"] > 0.5
    assert float16.loc[2.0**10, "relative error"] < 2 * 2**-10
    assert float16.loc[2.0**10, "zero gradients"] < 0.01
    bfloat16 = table[table.dtype == "bfloat16"].iloc[0]
    assert bfloat16["zero gradients"] == 0
    assert bfloat16["relative error"] < 2 * 2**-7


def test_updates_below_half_an_ulp_vanish_without_a_master_copy():
    found = rows(experiments.vanishing_updates())
    assert found["bfloat16"]["moved"] == 0
    assert abs(found["bfloat16, float32 master copy"]["moved"] - 0.1) < 2**-8
    assert abs(found["float32"]["moved"] - 0.1) < 1e-4


def test_small_learning_rates_leave_a_bfloat16_table_unmoved():
    table = experiments.embedding_updates()
    low = table[table.table == "bfloat16"].set_index("learning rate").unmoved
    assert low[1e-3] == 0
    assert low[2e-5] > 0.5
    assert (table[table.table == "float32"].unmoved < 0.01).all()


def test_flash_attention_keeps_the_error_rule_in_every_dtype_at_every_length():
    table = experiments.error_by_length((256, 1024), device="cpu")
    assert len(table) == 6
    assert (table.flash <= 2 * table.standard + 1e-5).all()
    by_dtype = table.groupby("dtype").flash.min()
    assert by_dtype["bfloat16"] > 2 * by_dtype["float16"] > 100 * by_dtype["float32"]


def test_tf32_costs_three_digits_of_a_float32_product():
    found = rows(experiments.tf32_surprise(device="cpu"))
    surprise = found["float32, TF32 allowed"]
    assert surprise["how"] == "emulated"
    assert surprise["relative error"] > 500 * found["float32"]["relative error"]
    assert 0.3 < surprise["relative error"] / found["float16"]["relative error"] < 3


def test_emulated_tf32_rounds_to_eleven_bits_to_nearest_even():
    x = torch.tensor([1 + 2**-10, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-11 + 2**-20, -1 - 2**-12])
    expected = torch.tensor([1 + 2**-10, 1.0, 1 + 2**-9, 1 + 2**-10, -1.0])
    assert torch.equal(_round_tf32(x), expected)


def test_every_backend_says_of_every_dtype_that_it_runs_or_why_not():
    table = experiments.dtype_refusals("cpu").set_index("backend")
    assert list(table.columns) == [str(d).removeprefix("torch.") for d in FLOAT_DTYPES]
    assert (table.loc["sdpa_flash"] == "runs").all()
    assert table.loc["flex", "float64"] == "takes float32, float16, bfloat16 on cpu, not float64"
    assert (table.map(len) > 3).all(axis=None)


def test_the_command_measures_every_rule_by_its_own_experiment(capsys):
    torch.manual_seed(5)
    main()
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(1))  # the caller's random numbers are left alone
    printed = capsys.readouterr().out
    assert all(rule.component in printed for rule in RULES)
    measured = [line for line in printed.splitlines() if "measured:" in line]
    assert len(measured) == len(RULES) >= 9
    assert all(re.search(r"\d", line) and "nan" not in line for line in measured)
    assert len({rule.experiment for rule in RULES}) == len(RULES)
