"""Training steps on several ranks, in one start of two processes: what is counted, what fails."""

import argparse
from dataclasses import replace

import pytest
import torch

from benchmarks import data_parallel, sequence_parallel
from benchmarks.__main__ import main
from benchmarks.data_parallel import Case, cases, measure_scaling, on_all_ranks, shape_of
from labsupport.distributed.data_parallel.costs import ddp_bytes_sent
from labsupport.distributed.process_group import RankInfo, all_gather_object
from labsupport.profiling import runs
from labsupport.training import PRESETS

TINY = {"preset": "tiny", "length": 32}
TOO_LARGE = "1x6400000000"  # its embedding alone has 1.2 PiB, more than an address space
DDP = Case("ddp", **TINY, world=2)
BROKEN = replace(DDP, batch=2)
CHOSEN = [
    Case("single", **TINY, world=1),
    Case("single", **TINY, world=1, micro_batches=3),
    DDP,
    replace(DDP, micro_batches=3),
    replace(DDP, micro_batches=3, sync_every=True),
    Case("fsdp", **TINY, world=2),
    replace(DDP, preset=TOO_LARGE),
    BROKEN,
    replace(DDP, batch=3),
    Case("fsdp", **TINY, world=2, dtype="bfloat16"),
    Case("single", **TINY, world=4),
]
RING = sequence_parallel.Case("tiny", 256, rung=3)


def measured(on_rows=None):
    """Measurements of each rank. Rank 1 fails alone in the case `BROKEN`."""
    info, real, seen = RankInfo.current(), data_parallel.measure_case, []

    def one_that_fails(case, *args, **options):
        if case == BROKEN and info.rank == 1:
            raise ValueError("rank one is unwell")
        return real(case, *args, **options)

    data_parallel.measure_case = one_that_fails
    torch.set_num_threads(1)
    count = None if info.rank else lambda rows: seen.append(len(rows))
    table = measure_scaling(CHOSEN, steps=1, warmup=1, timeout=4, on_rows=count)
    late = measure_scaling(CHOSEN[:1], seconds=0)
    others = replace(RING, kernel="native", layout="contiguous"), replace(RING, kernel="fa4")
    ring = [sequence_parallel.measure_case(case, 1) for case in (RING, *others)]
    ranks = all_gather_object(repr((table.to_dict("records"), ring)))
    table.attrs |= {"seen": seen, "late": late.status.tolist(), "ring": ring, "ranks": ranks}
    return table


@pytest.fixture(scope="module")
def table():
    return on_all_ranks(measured, argparse.Namespace(processes=2, device="cpu"), 30)


def row(table, **where):
    """The one row of these values, those of `DDP` where none is given."""
    rows = table
    for name, value in (vars(DDP) | where).items():
        rows = rows[rows[name] == value]
    assert len(rows) == 1
    return rows.iloc[0]


def test_each_strategy_is_tried_on_each_number_of_ranks():
    chosen = list(cases(["tiny", "8x128"], [1, 2], accumulation=3, length=32))
    assert len([case for case in chosen if case.preset == "8x128"]) == 3 * 2
    assert len([case for case in chosen if case.micro_batches == 3]) == 3 * 2 + 2
    several = [case for case in chosen if case.sync_every]
    assert {(case.strategy, case.world) for case in several} == {("ddp", 2), ("fsdp", 2)}


def test_all_ranks_agree_and_no_world_or_time_is_overdrawn(table):
    first, second = table.attrs["ranks"]
    assert first == second
    assert table.attrs["seen"] == list(range(1, len(table) + 1))
    assert set(table.world) == {1, 2}
    assert table.attrs["late"] == ["not tried"]


def test_fsdp_holds_half_of_what_ddp_holds_and_both_as_predicted(table):
    parameters = shape_of("tiny").parameters
    ddp, fsdp = (row(table, strategy=name) for name in ("ddp", "fsdp"))
    steps = ddp.optimizer_bytes - 8 * parameters  # AdamW counts steps, 4 bytes a tensor
    assert (ddp.parameter_bytes, ddp.gradient_bytes) == (4 * parameters, 4 * parameters)
    assert 0 < steps < 1000
    assert ddp.predicted_state_bytes == 16 * parameters == 2 * fsdp.predicted_state_bytes
    for one in (ddp, fsdp):
        assert one.state_bytes == pytest.approx(one.predicted_state_bytes, rel=0.005)


def test_without_no_sync_each_micro_batch_is_all_reduced(table):
    once, always = (row(table, micro_batches=3, sync_every=sync) for sync in (False, True))
    assert once.all_reduces >= 1
    assert always.all_reduces == 3 * once.all_reduces
    assert always.all_reduced_bytes == 3 * once.all_reduced_bytes == 12 * once.parameters
    assert once.predicted_sent_bytes == ddp_bytes_sent(once.all_reduced_bytes, 2)


def test_fsdp_in_bfloat16_sends_its_weights_in_two_bytes(table):
    shape = shape_of("tiny")
    root = shape.vocab_size * shape.width + 2 * shape.width  # gathered once; the blocks twice
    wide, narrow = (row(table, strategy="fsdp", dtype=name) for name in ("float32", "bfloat16"))
    saved = (2 * shape.parameters - root) * 2 / 2  # two bytes less, of which a rank sends half
    assert wide.predicted_sent_bytes - narrow.predicted_sent_bytes == saved


def test_efficiency_is_that_of_the_same_work_on_one_rank_alone(table):
    for micro_batches in (1, 3):
        alone = row(table, strategy="single", world=1, micro_batches=micro_batches)
        both = row(table, micro_batches=micro_batches)
        assert alone.efficiency == 1
        assert both.efficiency == pytest.approx(alone.step_ms / both.step_ms)
    without = data_parallel.with_efficiency(table[table.strategy != "single"])
    assert without.efficiency.isna().all()


def test_a_case_that_fails_is_a_row_and_the_next_cases_run(table):
    assert row(table, preset=TOO_LARGE).status == "out of memory"
    failed = row(table, batch=BROKEN.batch)
    assert (failed.status, failed.reason) == ("failed", "rank 1: ValueError: rank one is unwell")
    assert row(table, batch=3).status == "ok"
    assert "rank one is unwell" in data_parallel.show(table, None)


def test_a_sharded_sequence_is_measured(table):
    zigzag, contiguous, refused = table.attrs["ring"]
    config = PRESETS["tiny"]
    for found in (zigzag, contiguous):
        seconds = found["median_ms"] / 1000
        assert found["tokens_per_s"] == pytest.approx(256 / seconds)
        work = 7 * config.layers * 256**2 * config.width
        assert found["attention_tflops"] == pytest.approx(work / seconds / 2 / 1e12)
        assert found["tflops"] > found["attention_tflops"]
        assert found["q1_ms"] <= found["median_ms"] <= found["q3_ms"]
        assert found["peak_memory_bytes"] == max(map(int, found["peak_memory_by_rank"].split()))
    assert (zigzag["kernel"], contiguous["kernel"]) == ("flash_torch", "native")
    assert zigzag["loss"] == pytest.approx(contiguous["loss"], rel=1e-3)
    assert refused["status"] == "unsupported"
    assert "fa4" in refused["reason"]
    assert sequence_parallel.row_of(RING, 4)["seqlen_per_rank"] == 64


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("data_parallel --presets tiny --strategies single --length 16 --steps 1", "step_ms"),
        ("sequence_parallel --lengths 64 --repeats 1", "tiny, 64 tokens"),
    ],
)
def test_under_torchrun_rank_0_shows_and_saves(command, shown, tmp_path, monkeypatch, capsys):
    started = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    for name, value in (started | {"MASTER_PORT": 0}).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(runs, "data_dir", lambda: tmp_path)
    arguments = [*command.split(), "--device", "cpu", "--save", "one"]
    assert main(arguments) == 0
    assert shown in capsys.readouterr().out
    saved = runs.load_run("one")
    assert saved[["world", "status"]].values.tolist() == [[1, "ok"]]
    assert saved.attrs["provenance"]["command"].startswith("torchrun --nproc-per-node 1 ")
    with pytest.raises(SystemExit, match="there is a run 'one' already"):
        main(arguments)


def test_what_does_not_exist_is_refused_before_anything_starts(capsys):
    for wrong, said in (
        ("sequence_parallel --layouts zigzg", "there is no zigzg, only zigzag, contiguous"),
        ("sequence_parallel --rung 99", "invalid choice: 99"),
        ("generation --what decoding", "there is no decoding, only decode, throughput"),
        ("tasks --tasks code,poems --model none", "there is no poems, only windows, document"),
        ("training --rungs=7", "only 0, 1, 2, 3, 4, 5, 6"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(wrong.split())
        assert ended.value.code == 2
        assert said in capsys.readouterr().err
    with pytest.raises(ValueError, match="no preset"):
        main(["data_parallel", "--presets", "large"])
