"""Each experiment shows the failure that it is about, and the remedy next to it."""

import contextlib
import functools
import io

import pytest
import torch

from labsupport.precision import experiments
from labsupport.precision.experiments import RULES, _round_tf32


@pytest.fixture(scope="module")
def measured():
    """The table of each experiment by its name, and what the command prints about all of them."""
    tables, printed = {}, io.StringIO()

    def recording(rule):
        @functools.wraps(rule.experiment)
        def experiment():
            return tables.setdefault(rule.experiment.__name__, rule.experiment())

        return rule._replace(experiment=experiment)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(experiments, "RULES", tuple(map(recording, RULES)))
        torch.manual_seed(5)
        experiments.main()
        after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(1))  # the caller's random numbers are left alone
    return tables, printed.getvalue()


def rows(measured, name):
    table = measured[0][name]
    return {row[table.columns[0]]: row for row in table.to_dict("records")}


def test_the_command_measures_every_rule_by_its_own_experiment(measured):
    tables, printed = measured
    lines = dict(line.split(": ", 1) for line in printed.splitlines() if line[0] != " ")
    assert list(lines) == [rule.component for rule in RULES]
    assert len(tables) == len(RULES) >= 9
    assert lines["embedding"].endswith("70% in bfloat16, 0% in float32")
    assert not any("nan" in line for line in lines.values())


def test_float16_logits_overflow_in_the_textbook_and_not_in_flash_attention(measured):
    found = rows(measured, "float16_logits_overflow")
    lost = {name: row["NaN in output"] for name, row in found.items()}
    assert lost == dict.fromkeys(found, 0) | {"textbook, float16": 16 * 64}
    assert found["textbook, float16"]["largest score"] == float("inf")
    # 40 * 40 * 64, and scaled by 1/8 first
    assert found["textbook, bfloat16"]["largest score"] == 102_400
    assert found["textbook, float16, q scaled first"]["largest score"] == 12_800


def test_norm_statistics_fail_in_float16_at_both_ends_and_nowhere_in_float32(measured):
    table = measured[0]["norm_statistics"].set_index(["computation", "magnitude"])
    by_hand = table.loc["by hand, in float16"]
    assert by_hand.loc[1e-4, "non-finite"] == 8 * 768
    assert by_hand.loc[300.0, "relative error"] == 1.0  # divided by infinity
    assert by_hand.loc[1.0, "relative error"] < 1e-3
    for other in ("by hand, statistics in float32", "F.rms_norm of float16"):
        assert (table.loc[other]["non-finite"] == 0).all()
        assert (table.loc[other]["relative error"] < 2**-11).all()


def test_a_running_sum_stops_at_two_to_the_number_of_significant_bits(measured):
    sums = {name: row["sum"] for name, row in rows(measured, "running_sum").items()}
    assert sums == {"float16": 2**11, "bfloat16": 2**8, "float32": 4096}


def test_most_gradients_of_float16_logits_are_zero_and_none_with_the_loss_in_float32(measured):
    found = rows(measured, "cross_entropy_dtypes")
    low, fixed = found["float16"], found["float16, loss in float32"]
    assert low["zero gradients"] > 0.5
    assert low["row sum"] > 0.02
    assert fixed["zero gradients"] == 0
    assert max(fixed["row sum"], fixed["loss error"]) < 1e-5
    # A loss of about 12 is stored in steps of 2^-7 and 2^-4, and so are the logarithms in it.
    assert 1e-4 < low["loss error"] < found["bfloat16"]["loss error"] < 2**-3


def test_gradients_underflow_in_float16_unless_scaled_and_not_in_bfloat16(measured):
    table = measured[0]["gradient_underflow"].set_index(["dtype", "loss scale"])
    assert table.loc[("float16", 1.0), "relative error"] > 0.5
    assert table.loc[("float16", 2.0**10), "relative error"] < 2 * 2**-10
    assert table.loc[("float16", 2.0**10), "zero gradients"] < 0.01
    assert table.loc[("bfloat16", 1.0), "zero gradients"] == 0
    assert table.loc[("bfloat16", 1.0), "relative error"] < 2 * 2**-7


def test_small_updates_vanish_in_bfloat16_without_a_master_copy(measured):
    found = rows(measured, "vanishing_updates")
    assert found["bfloat16"]["moved"] == 0
    assert abs(found["bfloat16, float32 master copy"]["moved"] - 0.1) < 2**-8
    assert abs(found["float32"]["moved"] - 0.1) < 1e-4
    unmoved = measured[0]["embedding_updates"].set_index(["table", "learning rate"]).unmoved
    assert unmoved["bfloat16"][1e-3] == 0
    assert unmoved["bfloat16"][2e-5] > 0.5
    assert (unmoved["float32"] < 0.01).all()


def test_flash_attention_keeps_the_error_rule_in_every_dtype_at_every_length(measured):
    table = measured[0]["error_by_length"]
    assert (table.flash <= 2 * table.standard + 1e-5).all()
    by_dtype = table.groupby("dtype").flash.min()
    assert by_dtype["bfloat16"] > 2 * by_dtype["float16"] > 100 * by_dtype["float32"]


def test_tf32_costs_three_digits_of_a_float32_product(measured):
    found = rows(measured, "tf32_surprise")
    surprise = found["float32, TF32 allowed"]["relative error"]
    assert surprise > 500 * found["float32"]["relative error"]
    assert 0.3 < surprise / found["float16"]["relative error"] < 3
    x = torch.tensor([1 + 2**-10, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-11 + 2**-20, -1 - 2**-12])
    expected = torch.tensor([1 + 2**-10, 1.0, 1 + 2**-9, 1 + 2**-10, -1.0])
    assert torch.equal(_round_tf32(x), expected)  # 11 bits, to nearest even
