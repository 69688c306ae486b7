"""What notebook 3 launches: right results, wrong ones after mistakes, counts, and one error."""

import pandas as pd
import pytest

from labsupport.distributed import demos
from labsupport.distributed.launch import LaunchError, launch


@pytest.fixture(scope="module")
def ring():
    sizes = {"seqlen": 128, "timed": 512, "lengths": [256, 512]}
    return launch(demos.ring_on_ranks, kwargs=sizes, processes=2, device="cpu")


@pytest.fixture(scope="module")
def trained():
    sizes = {"seqlen": 64, "micro_batches": 3, "steps": 2, "layers": 1}
    ranks = launch(demos.train_on_ranks, kwargs=sizes, processes=2, device="cpu")
    return pd.DataFrame(ranks[0] + ranks[1])


def test_both_rings_agree_with_one_device_on_every_rank(ring):
    for rows in (rank["errors"] for rank in ring):
        errors = pd.DataFrame(rows)
        assert set(errors["case"]) == {"contiguous", "zigzag"}
        assert set(errors["tensor"]) == {"out", "dq", "dk", "dv"}
        assert (errors["relative"] < 2e-6).all()


def test_mistakes_change_a_models_loss_and_nothing_else_does(ring):
    losses = pd.DataFrame(ring[0]["losses"]).set_index("case")["loss"]
    one = losses["one device"]
    assert losses["contiguous"] == pytest.approx(one, abs=1e-5)
    assert losses["zigzag"] == pytest.approx(one, abs=1e-5)
    assert losses["zigzag shards, contiguous ring"] > 1.5 * one
    assert losses["positions from 0 on each rank"] > 4 * one
    assert 1.005 * one < losses["labels shifted after the cut"] < 1.1 * one
    assert ring[0]["losses"] == ring[1]["losses"]


def test_spans_lie_on_one_clock_and_every_rank_sends(ring):
    spans = pd.DataFrame(ring[0]["spans"] + ring[1]["spans"])
    for _, rows in spans.groupby("layout"):
        assert (rows["end"] > rows["start"]).all()
        assert rows["end"].max() - rows["start"].min() < 30
        assert set(zip(rows["rank"], rows["what"], strict=True)) == {
            (0, "compute"), (0, "message"), (1, "compute"), (1, "message")
        }  # fmt: skip


def test_spans_that_touch_become_one():
    assert demos.joined([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0), (2.0005, 2.5)]) == [
        (0.0, 2.5), (3.0, 4.0)
    ]  # fmt: skip


def test_two_ranks_need_half_of_what_one_needs(ring):
    alone = demos.step_memory([512])[0]
    assert (alone["ranks"], alone["sent_bytes"]) == (1, 0)
    shared = [row for rank in ring for row in rank["memory"] if row["seqlen"] == 512]
    for row in shared:
        assert row["ranks"] == 2
        assert row["sent_bytes"] > 0
        assert alone["peak_memory_bytes"] / row["peak_memory_bytes"] == pytest.approx(2, abs=0.2)


def test_no_sync_reduces_once_a_step_for_the_same_loss(trained):
    by_case = trained.set_index(["case", "rank"])
    assert by_case["loss"].max() - by_case["loss"].min() < 1e-4
    often, once = by_case.loc["DDP, without no_sync"], by_case.loc["DDP"]
    assert (often["all_reduces"] == 3 * once["all_reduces"]).all()
    assert (often["all_reduced_bytes"] == 3 * once["all_reduced_bytes"]).all()
    assert (once["all_reduced_bytes"] == once["gradients"]).all()
    assert by_case.loc["FSDP", "all_reduces"].isna().all()


def test_two_ranks_hold_the_whole_model_under_ddp_and_half_of_it_under_fsdp(trained):
    held = trained.groupby("case")[["parameters", "gradients", "optimizer"]].sum().sum(axis=1)
    assert held["FSDP"] / held["DDP"] == pytest.approx(0.5, abs=0.01)


def test_the_killed_rank_is_named():
    with pytest.raises(LaunchError, match="rank 1 of 2 failed: killed by SIGKILL"):
        launch(demos.leave, processes=2, device="cpu")
