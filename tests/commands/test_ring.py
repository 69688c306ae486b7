"""`labsupport ring` finds wrong rings, makes rows of failures, and its columns tell the truth."""

import contextlib
import io
from dataclasses import replace

import pytest

from labsupport.distributed import ring_programs
from labsupport.distributed.ring import kernels
from labsupport.distributed.ring_programs import Setting
from labsupport.profiling import runs
from tests.commands.program import program


def settings(names, layouts=("zigzag",), directions=ring_programs.DIRECTIONS):
    """Settings of 8 tokens a rank, 2 heads of 4 with 1 of keys, in float32."""
    return [
        Setting(layout, name, 8, 2, 1, 4, "float32", direction)
        for name in names
        for layout in layouts
        for direction in directions
    ]


@pytest.fixture
def workers(pool):
    """Two processes in one process group."""
    return pool(2)


# --- kernels with a fault, in the place of flash_torch --------------------------------------------


def without_shift(q, k, v, options):
    """Returns m + log(l) without the maximum m: right in each block, wrong between them."""
    out, lse = kernels.FLASH_TORCH.forward(q, k, v, options)
    scores = options.scale * (q.transpose(1, 2) @ k.repeat_interleave(2, 2).permute(0, 2, 3, 1))
    return out, lse - scores.amax(-1)


def with_its_own_lse(dout, q, k, v, out, lse, options):
    """A backward that uses its own block's log-sum-exp, as autograd's would."""
    _, own = kernels.FLASH_TORCH.forward(q, k, v, options)
    return kernels.FLASH_TORCH.backward(dout, q, k, v, out, own, options)


def that_fails(q, k, v, options):
    raise RuntimeError("CompilationError: at 1:0")


@contextlib.contextmanager
def in_the_table(name="flash_torch", **changes):
    """The table with a changed kernel."""
    table = kernels.KERNELS
    kernels.KERNELS = tuple(
        replace(kernel, **changes) if kernel.name == name else kernel for kernel in table
    )
    try:
        yield
    finally:
        kernels.KERNELS = table


def checked(rank, group, changes, options, kernel="flash_torch"):
    """Exit status and what is printed on a rank, of a check with a changed kernel."""
    printed = io.StringIO()
    with in_the_table(kernel, **changes), contextlib.redirect_stdout(printed):
        status = ring_programs.check(kernels=[kernel], **options)
    return status, printed.getvalue()


def benched(rank, group, changes, ranks, settings):
    """The table as rows (on rank 0) and what is printed; changes are made on some ranks."""
    printed = []
    with in_the_table(**(changes if rank in ranks else {})):
        table = ring_programs.measure_ring(settings=settings, seconds=0.01, say=printed.append)
    if table is None:
        return None, printed
    assert table.attrs["provenance"]["world"] == 2
    assert list(table.columns) == ring_programs.COLUMNS
    return table.to_dict("records"), printed


# --- check ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forward": without_shift}, "flash_torch  out: relative error"),
        ({"backward": with_its_own_lse}, "flash_torch  dq: relative error"),
        ({"forward": that_fails}, "all ranks: RuntimeError: CompilationError"),
    ],
)
def test_a_wrong_ring_is_found_on_all_ranks(workers, changes, message):
    answers = workers.run(checked, changes, {"heads": 2, "kv_heads": 1})
    assert [status for status, _ in answers] == [1, 1]
    printed = answers[0][1].partition("\nFAILED: ")[2]
    assert message in printed
    assert ("~/.triton/cache" in printed) is ("Compilation" in message)


def test_a_kernel_that_is_not_here_and_a_length_that_cannot_be_cut_fail(workers):
    for options, kernel, message in (
        ({}, "fa4", "FAILED: fa4 cannot run here"),
        ({"seqlen": 33}, "flash_torch", "--seqlen 36 can"),
    ):
        (status, printed), _ = workers.run(checked, {}, options, kernel)
        assert status == 1
        assert message in printed


@pytest.mark.slow
def test_the_command_starts_its_processes_itself(capfd):
    line = "ring check --processes 2 --kernel native,flash_torch --dtype bfloat16"
    printed = program(*line.split()).output + capfd.readouterr().out
    assert all(part in printed for part in ("all is well", "a hop of 8 bytes", "rank 1:"))


# --- bench ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_columns_mean_what_they_say(workers):
    chosen = settings(["native", "flash_torch"], ["zigzag", "contiguous"])
    (rows, printed), (nothing, _) = workers.run(benched, {}, (), chosen)
    assert nothing is None
    assert len(rows) == len(printed) - 1 == 2 * 2 * 2
    assert "the mark of +20% is" in printed[-1]
    native = {(row["layout"], row["direction"]): row["median_ms"] for row in rows[:4]}
    for row in rows:
        assert row["status"] == "ok", row["reason"]
        assert row["efficiency"] == pytest.approx(2 * row["single_ms"] / row["median_ms"])
        assert row["iterations_per_s"] == pytest.approx(1000 / row["median_ms"])
        assert row["q1_ms"] <= row["median_ms"] <= row["q3_ms"]
        assert row["peak_memory_bytes"] > 0
        pairs = 16 * 17 / 2  # of the whole sequence, causal
        flops = 4 * 4 * 2 * pairs * (1 if row["direction"] == "forward" else 3.5)
        assert row["tflops"] == pytest.approx(flops / 2 / row["median_ms"] / 1e9)
        # K and V of 8 tokens in float32, again in the backward, and dK and dV if they are zigzag:
        # of contiguous shards, rank 0 sends keys only, and rank 1 gradients only.
        hops = 1 if row["direction"] == "forward" else {"zigzag": 3, "contiguous": 2}[row["layout"]]
        assert row["sent_bytes"] == hops * 2 * 8 * 4 * 4
        assert row["transport"] == "send_receive"
        own = native[row["layout"], row["direction"]]
        assert row["of_native"] == pytest.approx(own / row["median_ms"])


def test_what_fails_on_one_rank_is_a_row_on_all_and_the_next_case_runs(workers):
    chosen = settings(["flash_torch", "native", "cudnn"], directions=["forward+backward"])
    (rows, _), _ = workers.run(benched, {"forward": that_fails}, (1,), chosen)
    broken, native, cudnn = rows
    assert broken["status"] == "failed"
    assert broken["reason"].startswith("rank 1: RuntimeError: CompilationError")
    assert (native["status"], cudnn["status"]) == ("ok", "unsupported")


def bench_here(folder, line):
    """Run the command as a rank of torchrun would, with the runs in a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "runs_dir", lambda: folder)
        program(*line.split())


def test_the_bench_command_saves_a_run(pool, tmp_path):
    line = (
        "ring bench --seqlen 8 --heads 2 --kv-heads 1 --head-dim 4 --implementations native "
        "--layouts contiguous,zigzag --max-seconds 0.001 --save here"
    )
    pool(2, joined=False).run(bench_here, tmp_path, line, ranks=1)
    first, *rows = (tmp_path / "here/results.csv").read_text().splitlines()
    assert first.startswith("world,layout,")
    assert len(rows) == 4
    assert all(",ok," in row for row in rows)
