"""The functions that notebook 3 launches: right results, wrong ones after mistakes, and counts."""

import pandas as pd
import pytest

from labsupport.distributed import demos


@pytest.fixture(scope="module")
def ring(pool):
    sizes = {"seqlen": 64, "timed": 256, "lengths": [512]}
    return pool(2, joined=False).run(demos.ring_on_ranks, **sizes)


@pytest.fixture(scope="module")
def trained(pool):
    sizes = {"seqlen": 64, "micro_batches": 3, "steps": 2, "layers": 1}
    ranks = pool(2, joined=False).run(demos.train_on_ranks, **sizes)
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
    assert demos.joined([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0), (2.0005, 2.5)]) == [
        (0.0, 2.5), (3.0, 4.0)
    ]  # fmt: skip


def test_two_ranks_need_half_of_what_one_needs(ring):
    alone = demos.step_memory([512])[0]
    assert (alone["ranks"], alone["sent_bytes"]) == (1, 0)
    for (row,) in (rank["memory"] for rank in ring):
        assert (row["ranks"], row["seqlen"]) == (2, 512)
        assert row["sent_bytes"] > 0
        assert alone["peak_memory_bytes"] / row["peak_memory_bytes"] == pytest.approx(2, abs=0.2)


def test_no_sync_reduces_once_a_step_and_fsdp_holds_half_for_the_same_loss(trained):
    by_case = trained.set_index(["case", "rank"])
    assert by_case["loss"].max() - by_case["loss"].min() < 1e-4
    often, once = by_case.loc["DDP, without no_sync"], by_case.loc["DDP"]
    assert (often["all_reduces"] == 3 * once["all_reduces"]).all()
    assert (often["all_reduced_bytes"] == 3 * once["all_reduced_bytes"]).all()
    assert (once["all_reduced_bytes"] == once["gradients"]).all()
    assert by_case.loc["FSDP", "all_reduces"].isna().all()
    held = trained.groupby("case")[["parameters", "gradients", "optimizer"]].sum().sum(axis=1)
    assert held["FSDP"] / held["DDP"] == pytest.approx(0.5, abs=0.01)
