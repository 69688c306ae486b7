"""The scaling benchmark, on two processes: what it counts, and what it says of cases that fail."""

import pandas as pd
import pytest
import torch

from benchmarks import data_parallel as benchmark
from benchmarks.__main__ import main
from benchmarks.data_parallel import Case, cases, measure_scaling, shape_of, show, with_efficiency
from labsupport.distributed import cleanup_ddp, setup_ddp
from labsupport.distributed.data_parallel.costs import ddp_bytes_sent
from labsupport.distributed.launch import launch
from labsupport.profiling.runs import load_run

TINY = {"preset": "tiny", "length": 32}
TOO_LARGE = "1x6400000000"  # its embedding alone has 1.2 PiB, more than an address space
CHOSEN = [
    *cases(["tiny"], [1, 2], accumulation=3, length=32),
    Case("ddp", TOO_LARGE, 2, length=32),
    Case("ddp", **TINY, world=2, batch=2),
    Case("ddp", **TINY, world=2, batch=3),
    Case("fsdp", **TINY, world=2, dtype="bfloat16"),
    Case("single", **TINY, world=4),
]
BROKEN = CHOSEN[-4]


def measured():
    """The table as each rank has it. Rank 1 fails alone in the case `BROKEN`."""
    info = setup_ddp()
    torch.set_num_threads(1)
    real = benchmark.measure_case

    def one_that_fails(case, *args, **options):
        if case == BROKEN and info.rank == 1:
            raise ValueError("rank one is unwell")
        return real(case, *args, **options)

    benchmark.measure_case = one_that_fails
    seen = []
    on_rows = None if info.rank else lambda rows: seen.append(len(rows))
    table = measure_scaling(CHOSEN, steps=2, warmup=1, timeout=4, on_rows=on_rows)
    late = measure_scaling(CHOSEN[:1], seconds=0)
    cleanup_ddp()
    return table, seen, late


@pytest.fixture(scope="module")
def results():
    return launch(measured, processes=2, device="cpu", timeout=30)


@pytest.fixture(scope="module")
def table(results):
    return results[0][0]


def row(table, *, world=2, micro_batches=1, sync_every=False, batch=1, dtype="float32", **where):
    """The one row of these values, the defaults among them."""
    where = {"preset": "tiny"} | where
    where |= {"world": world, "micro_batches": micro_batches, "sync_every": sync_every}
    where |= {"batch": batch, "dtype": dtype}
    rows = table
    for name, value in where.items():
        rows = rows[rows[name] == value]
    assert len(rows) == 1
    return rows.iloc[0]


def test_all_ranks_agree_and_no_world_or_time_is_overdrawn(results):
    (first, seen, late), (second, _, _) = results
    pd.testing.assert_frame_equal(first, second)
    assert seen == list(range(1, len(first) + 1))
    assert set(first.world) == {1, 2}
    assert list(late.status) == ["not tried"]


def test_fsdp_holds_half_of_what_ddp_holds_and_both_as_predicted(table):
    parameters = shape_of("tiny").parameters
    ddp, fsdp = (row(table, strategy=name, preset="tiny") for name in ("ddp", "fsdp"))
    steps = ddp.optimizer_bytes - 8 * parameters  # AdamW counts steps, 4 bytes a tensor
    assert (ddp.parameter_bytes, ddp.gradient_bytes) == (4 * parameters, 4 * parameters)
    assert 0 < steps < 1000
    assert ddp.predicted_state_bytes == 16 * parameters == 2 * fsdp.predicted_state_bytes
    for one in (ddp, fsdp):
        assert one.state_bytes == pytest.approx(one.predicted_state_bytes, rel=0.005)


def test_without_no_sync_each_micro_batch_is_all_reduced(table):
    once, always = (
        row(table, strategy="ddp", micro_batches=3, sync_every=sync) for sync in (False, True)
    )
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
        both = row(table, strategy="ddp", micro_batches=micro_batches)
        assert alone.efficiency == 1
        assert both.efficiency == pytest.approx(alone.step_ms / both.step_ms)
    without = table[table.strategy != "single"]
    assert with_efficiency(without).efficiency.isna().all()


def test_a_case_that_fails_is_a_row_and_the_next_cases_run(table):
    assert row(table, strategy="ddp", preset=TOO_LARGE).status == "out of memory"
    failed = row(table, strategy="ddp", batch=BROKEN.batch)
    assert (failed.status, failed.reason) == ("failed", "rank 1: ValueError: rank one is unwell")
    assert row(table, strategy="ddp", batch=3).status == "ok"
    assert "rank one is unwell" in show(table, None)


def test_the_command_starts_its_processes_and_keeps_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("labsupport.profiling.runs.runs_dir", lambda: tmp_path)
    arguments = "--processes 1 --presets tiny --strategies single --length 16 --steps 1 --warmup 0"
    assert main(["data_parallel", *arguments.split(), "--save", "try"]) == 0
    printed = capsys.readouterr().out
    assert "step_ms" in printed
    assert load_run("try", folder=tmp_path).status.tolist() == ["ok"]
    with pytest.raises(ValueError, match="no preset"):
        main(["data_parallel", "--presets", "large"])
