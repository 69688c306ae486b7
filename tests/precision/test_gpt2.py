"""A small GPT-2 under several policies: the good ones follow float32, the bad one does not."""

import pytest

from labsupport.precision.experiments.gpt2 import (
    FAILING,
    NOISE,
    YARDSTICK,
    distances,
    train_under_policies,
)

STEPS = 30  # the experiment's own default is 50; 30 show the same in less time


@pytest.fixture(scope="module")
def table():
    return train_under_policies(STEPS, device="cpu")


def test_training_learns_in_float32(table):
    losses = table[table.run == YARDSTICK].loss.to_numpy()
    assert len(losses) == STEPS
    assert 5.3 < losses[0] < 5.8  # ln(256) = 5.55
    assert losses[-10:].mean() < 4


@pytest.mark.parametrize("run", ["bfloat16", "float16, loss scaled"])
def test_a_good_policy_follows_float32_within_the_noise_of_a_second_seed(table, run):
    found = distances(table).set_index("run")
    assert found.loc[NOISE, "over noise"] == 1
    assert found.loc[run, "over noise"] < 0.5


def test_a_float16_loss_without_scaling_visibly_fails(table):
    found = distances(table).set_index("run")
    assert found.loc[FAILING, "over noise"] > 3
    last = table[table.step > STEPS - 10].groupby("run").loss.mean()
    assert last[FAILING] > max(last[YARDSTICK], last[NOISE]) + 0.3


def test_the_tracker_says_where_the_bad_run_fails_and_that_float32_and_bfloat16_are_well(table):
    reports = table.attrs["reports"]
    assert "First: underflow at the gradient of the output of lm_head" in reports[FAILING]
    assert "Scale the loss" in reports[FAILING]
    for run in (YARDSTICK, "bfloat16"):
        assert "All is well" in reports[run]
