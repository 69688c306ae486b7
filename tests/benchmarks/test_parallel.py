"""Training steps on two ranks: what is counted, what fails."""

from dataclasses import replace

import pytest

from benchmarks import data_parallel, sequence_parallel
from benchmarks.__main__ import main
from benchmarks.data_parallel import Scaling, measure_scaling
from labsupport.distributed.data_parallel.costs import ddp_bytes_sent
from labsupport.distributed.process_group import cleanup_ddp, setup_ddp
from labsupport.training import PRESETS

TINY = {"preset": "tiny", "length": 32}
DDP = Scaling("ddp", **TINY, world=2)
# By the name under which the tests look at its row.
CHOSEN = {
    "single": Scaling("single", **TINY, world=1),
    "ddp": DDP,
    "three": replace(DDP, micro_batches=3),
    "three, in sync": replace(DDP, micro_batches=3, sync_every=True),
    "fsdp": Scaling("fsdp", **TINY, world=2),
    "offload": Scaling("fsdp, offload", **TINY, world=2),
    "ring": Scaling("ring", **TINY, world=2),
    # Its embedding alone has 1.2 PiB, more than an address space.
    "too large": replace(DDP, preset="1x6400000000"),
    "of four": Scaling("single", **TINY, world=4),
}
RING = sequence_parallel.RingStep("tiny", 256, savings=3)


def measured():
    """Measurements of a rank."""
    info, seen = setup_ddp("gloo", 30), []
    count = None if info.rank else lambda rows: seen.append(len(rows))
    chosen = list(CHOSEN.values())
    table = measure_scaling(chosen, steps=1, warmup=1, timeout=30, on_rows=count)
    late = measure_scaling(chosen[:1], seconds=0)
    others = replace(RING, kernel="native", layout="contiguous"), replace(RING, kernel="fa4")
    ring = [sequence_parallel.measure_case(case, 1) for case in (RING, *others)]
    cleanup_ddp()
    return table, ring, late.status.tolist(), seen


pytestmark = pytest.mark.slow  # ranks that import PyTorch


@pytest.fixture(scope="module")
def ranks(pool):
    return pool(2, joined=False).run(measured)


def test_all_ranks_have_one_table_whose_columns_mean_what_they_say_and_failures_are_rows(ranks):
    (table, ring, late, seen), (other, other_ring, _, _) = ranks
    assert repr((table.to_dict("records"), ring)) == repr((other.to_dict("records"), other_ring))
    assert seen == list(range(1, len(table) + 1))
    assert late == ["not tried"]
    row = dict(zip(CHOSEN, table.itertuples(), strict=False))  # but four ranks, who are not there
    assert row.keys() == CHOSEN.keys() - {"of four"}
    assert row["too large"].status == "out of memory"
    assert {found.status for name, found in row.items() if name != "too large"} == {"ok"}
    parameters, ddp, fsdp = PRESETS["tiny"].parameters, row["ddp"], row["fsdp"]
    assert ddp.predicted_state_bytes == 16 * parameters == 2 * fsdp.predicted_state_bytes
    for one in (ddp, fsdp):
        assert one.state_bytes == pytest.approx(one.predicted_state_bytes, rel=0.005)
    once, always = row["three"], row["three, in sync"]
    assert always.all_reduces == 3 * once.all_reduces >= 3
    assert always.all_reduced_bytes == 3 * once.all_reduced_bytes == 12 * parameters
    assert once.predicted_sent_bytes == ddp_bytes_sent(once.all_reduced_bytes, 2)
    assert row["single"].efficiency == 1
    assert ddp.efficiency == pytest.approx(row["single"].step_ms / ddp.step_ms)
    without = data_parallel.with_efficiency(table[table.strategy != "single"])
    assert without.efficiency.isna().all()


def test_a_sharded_sequence_is_measured(ranks):
    zigzag, contiguous, refused = ranks[0][1]
    config = PRESETS["tiny"]
    for found in (zigzag, contiguous):
        seconds = found["median_ms"] / 1000
        assert found["tokens_per_s"] == pytest.approx(256 / seconds)
        work = 7 * config.layers * 256**2 * config.width
        assert found["attention_tflops"] == pytest.approx(work / seconds / 2 / 1e12)
        assert found["tflops"] > found["attention_tflops"]
        assert found["peak_memory_bytes"] == max(map(int, found["peak_memory_by_rank"].split()))
    assert (zigzag["kernel"], contiguous["kernel"]) == ("flash_torch", "native")
    assert zigzag["loss"] == pytest.approx(contiguous["loss"], rel=1e-3)
    assert refused["status"] == "unsupported"
    assert "fa4" in refused["reason"]
    assert sequence_parallel.row_of(RING, 4)["seqlen_per_rank"] == 64


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("data_parallel --presets tiny --length 16 --steps 1 --warmup 0", "step_ms"),
        ("sequence_parallel --lengths 64 --repeats 1", "tokens_per_s"),
    ],
)
def test_under_torchrun_rank_0_shows_and_saves(command, shown, saved, monkeypatch, capsys):
    started = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    for name, value in (started | {"MASTER_PORT": 0}).items():
        monkeypatch.setenv(name, str(value))
    arguments = [*command.split(), "--device", "cpu", "--save", "one"]
    assert main(arguments) == 0
    assert shown in capsys.readouterr().out
    table = saved("one")
    assert (set(table.world), set(table.status)) == ({1}, {"ok"})
    assert table.attrs["provenance"]["command"].startswith("torchrun --nproc-per-node 1 ")
    with pytest.raises(SystemExit, match="there is a run 'one' already"):
        main(arguments)
