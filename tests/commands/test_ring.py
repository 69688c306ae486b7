"""`labsupport ring` finds wrong rings, makes rows of failures, and its columns tell the truth."""

import contextlib
import io
import re
import time
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from labsupport.commands.ring import ring_app
from labsupport.distributed.ring import kernels
from labsupport.distributed.ring_tools import bench, check
from labsupport.profiling.runs import list_runs
from tests.distributed.workers import Workers

SIZES = {"seqlens": [8], "heads": 2, "kv_heads": [1], "head_dim": 4, "max_seconds_per_case": 0.01}


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    pool = Workers(2, tmp_path_factory.mktemp("ring-command"))
    yield pool
    pool.close()


def command(*arguments):
    """Exit status, and what is printed."""
    result = CliRunner().invoke(ring_app, arguments)
    return result.exit_code, result.output


# --- kernels with a fault, in the place of flash_torch --------------------------------------------


def without_shift(q, k, v, options):
    """Returns m + log(l) without the maximum m: right in each block, wrong between them."""
    out, lse = kernels.FLASH_TORCH.forward(q, k, v, options)
    scores = options.scale * (q.transpose(1, 2) @ k.repeat_interleave(2, 2).permute(0, 2, 3, 1))
    return out, lse - scores.amax(-1)


def with_its_own_lse(dout, q, k, v, out, lse, options):
    """A backward that uses its own block's log-sum-exp, as autograd's would."""
    _, own = kernels.FLASH_TORCH.forward(q, k, v, options)
    backward = kernels.FLASH_TORCH.backward
    assert backward is not None
    return backward(dout, q, k, v, out, own, options)


def that_fails(q, k, v, options):
    """Does not compile, say."""
    raise RuntimeError("CompilationError: at 1:0")


def that_breaks(q, k, v, options):
    """A failure that has nothing to do with a compiler."""
    raise RuntimeError("the weather is bad")


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
    said = io.StringIO()
    with in_the_table(kernel, **changes), contextlib.redirect_stdout(said):
        status = check.main(kernels=[kernel], speeds=False, **options)
    return status, said.getvalue()


def benched(rank, group, changes, ranks, options):
    """The table as rows (on rank 0) and what is printed; changes are made on some ranks."""
    said = []
    with in_the_table(**(changes if rank in ranks else {})):
        table = bench.measure_ring(**SIZES, **options, say=said.append)
    if table is None:
        return None, said
    assert table.attrs["provenance"]["world"] == 2
    assert list(table.columns) == bench.COLUMNS
    return table.to_dict("records"), said


# --- check ----------------------------------------------------------------------------------------


def test_a_right_ring_passes(workers):
    for status, said in workers.run(checked, {}, {"heads": 2, "kv_heads": 1}):
        assert status == 0, said
    (_, said), (_, silent) = workers.run(checked, {}, {"dtype": "bfloat16"})
    assert "all is well" in said
    assert "rank 1:" in said
    assert silent == "", "only rank 0 prints"


@pytest.mark.parametrize(
    ("changes", "tensor"),
    [({"forward": without_shift}, "out"), ({"backward": with_its_own_lse}, "dq")],
    ids=["forward without the shift", "backward with its own lse"],
)
def test_a_wrong_ring_is_found_on_all_ranks(workers, changes, tensor):
    answers = workers.run(checked, changes, {"heads": 2, "kv_heads": 1})
    assert [status for status, _ in answers] == [1, 1]
    said = answers[0][1]
    assert f"FAILED: {tensor} of ring by flash_torch: relative error" in said
    assert "Large errors mean" in said


def test_a_kernel_that_does_not_run_is_a_failure_with_advice(workers):
    answers = workers.run(checked, {"forward": that_fails}, {})
    assert [status for status, _ in answers] == [1, 1]
    assert "all ranks: RuntimeError: CompilationError" in answers[0][1]
    assert "~/.triton/cache" in answers[0][1]


@pytest.mark.parametrize(
    ("kernel", "changes", "said", "remedies"),
    [
        ("flash_triton", {"forward": that_breaks}, "the weather is bad", 0),
        ("flash_triton", {"backward": with_its_own_lse}, "dq of triton ring by flash_triton", 1),
        ("fa4", {}, "fa4 cannot run here: ", 0),
    ],
    ids=["a failure without a remedy", "large errors", "a kernel that is not here"],
)
def test_the_remedy_is_for_what_was_said_and_not_for_the_kernels_name(
    workers, kernel, changes, said, remedies
):
    (status, text), _ = workers.run(checked, changes, {"heads": 2, "kv_heads": 1}, kernel)
    assert status == 1
    failure, *remedy = text.split("\n\n")[-1].strip().splitlines()
    assert failure.startswith("FAILED: ")
    assert said in failure
    assert failure.count("FAILED") == 1
    assert len(remedy) == remedies
    assert "Triton did not compile" not in text
    assert ("Large errors mean" in text) is bool(remedies)


def test_a_length_that_cannot_be_cut_is_refused_with_one_that_can(workers):
    (status, said), _ = workers.run(checked, {}, {"seqlen": 33})
    assert status == 1
    assert "--seqlen 36 can" in said


def test_the_command_starts_its_processes_itself(capfd):
    status, said = command("check", "--processes", "2", "--kernel", "native")
    said += capfd.readouterr().out
    assert status == 0, said
    assert "all is well" in said
    assert "a hop of 8 bytes" in said


def test_the_command_refuses_what_does_not_exist():
    with pytest.raises(ValueError, match="there are cudnn, native"):
        CliRunner().invoke(ring_app, ["check", "--kernel", "flash"], catch_exceptions=False)
    with pytest.raises(ValueError, match="there are contiguous, zigzag"):
        CliRunner().invoke(ring_app, ["bench", "--layouts", "stripes"], catch_exceptions=False)
    for name in ("check", "bench"):
        heads = [name, "--heads", "5", "--kv-heads", "2"]
        with pytest.raises(ValueError, match="--heads is a multiple of --kv-heads"):
            CliRunner().invoke(ring_app, heads, catch_exceptions=False)


# --- bench ----------------------------------------------------------------------------------------


def test_columns_mean_what_they_say(workers):
    options = {"implementations": ["native", "flash_torch"], "layouts": ["zigzag", "contiguous"]}
    (rows, said), (nothing, _) = workers.run(benched, {}, (), options)
    assert nothing is None
    assert len(rows) == len(said) - 1 == 2 * 2 * 2
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
    by_native = {
        (row["layout"], row["direction"]): row["median_ms"]
        for row in rows
        if row["implementation"] == "native"
    }
    for row in rows:
        native = by_native[row["layout"], row["direction"]]
        assert row["of_native"] == pytest.approx(native / row["median_ms"])


def test_what_fails_on_one_rank_is_a_row_on_all_and_the_next_case_runs(workers):
    options = {"implementations": ["flash_torch", "native", "cudnn"], "layouts": ["zigzag"]}
    options["directions"] = ["forward+backward"]
    (rows, _), _ = workers.run(benched, {"forward": that_fails}, (1,), options)
    broken, native, cudnn = rows
    assert broken["status"] == "failed"
    assert broken["reason"].startswith("rank 1: RuntimeError: CompilationError")
    assert native["status"] == "ok"
    assert cudnn["status"] == "unsupported"


def test_what_has_not_begun_in_time_is_skipped(workers, tmp_path):
    file = tmp_path / "rows.csv"
    options = {"implementations": ["native"], "limit": 0.0, "rows_file": str(file)}
    (rows, _), _ = workers.run(benched, {}, (), options)
    assert {row["status"] for row in rows} == {"skipped"}
    assert file.read_text().count("skipped") == len(rows) == 4


def test_the_bench_command_saves_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr("labsupport.profiling.runs.runs_dir", lambda: tmp_path)
    sizes = ["--seqlen", "8", "--heads", "2", "--kv-heads", "1", "--head-dim", "4"]
    options = ["--implementations", "native", "--max-seconds-per-case", "0.01", "--save", "here"]
    status, said = command("bench", "--processes", "2", *sizes, *options)
    assert status == 0, said
    assert (tmp_path / "here" / "results.csv").read_text().startswith("world,layout,")
    # What could not be kept is refused before it is measured.
    began = time.monotonic()
    for wrong, error, said in (
        ([], FileExistsError, "there is a run here: choose another --save, or --overwrite"),
        (["--save", "no/name"], ValueError, "no name for a run"),
        (["--save", "new", "--rows", str(tmp_path / "no" / "rows.csv")], OSError, "is no folder"),
    ):
        with pytest.raises(error, match=said):
            CliRunner().invoke(
                ring_app, ["bench", *sizes, *options, *wrong], catch_exceptions=False
            )
    assert time.monotonic() - began < 1.0, "no process was started"


def test_the_examples_of_the_help_do_not_name_a_recorded_run():
    _, said = command("bench", "--help")
    (names,) = [re.findall(r"--save (ring-[a-z0-9-]+)", said)]
    assert names
    assert not set(names) & set(list_runs())
