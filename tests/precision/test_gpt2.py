"""A small GPT-2 under several policies: the good ones follow float32, the bad one does not."""

from labsupport.precision.experiments.gpt2 import (
    FAILING,
    NOISE,
    YARDSTICK,
    distances,
    train_under_policies,
)

STEPS = 4  # the experiment's own default is 50; 4 show the same in less time


def test_good_policies_follow_float32_and_an_unscaled_float16_loss_fails_where_the_tracker_says():
    table = train_under_policies(STEPS, device="cpu")
    losses = table[table.run == YARDSTICK].loss.to_numpy()
    assert len(losses) == STEPS
    assert 5.3 < losses[0] < 5.8  # ln(256) = 5.55
    last = table[table.step == STEPS].set_index("run").loss
    assert last[YARDSTICK] < 5.1
    assert last[FAILING] > max(last[YARDSTICK], last[NOISE]) + 0.1
    over_noise = distances(table).set_index("run")["over noise"]
    assert over_noise[NOISE] == 1
    assert over_noise[["bfloat16", "float16, loss scaled"]].max() < 0.5
    assert over_noise[FAILING] > 2
    reports = table.attrs["reports"]
    assert "First: underflow at the gradient of the output of lm_head" in reports[FAILING]
    assert "Scale the loss" in reports[FAILING]
    assert all("No problems found" in reports[run] for run in (YARDSTICK, "bfloat16"))
