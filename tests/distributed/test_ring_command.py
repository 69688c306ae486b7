"""`labsupport ring` finds wrong rings, makes rows of failures, and its columns tell the truth."""

import contextlib
import io
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from labsupport.distributed.ring import kernels
from labsupport.distributed.ring_command import bench, check, cluster
from labsupport.distributed.ring_command.command import ring_app
from labsupport.distributed.ring_command.trouble import advice
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


@contextlib.contextmanager
def in_place_of_flash_torch(**changes):
    """The table with a changed kernel."""
    table = kernels.KERNELS
    kernels.KERNELS = tuple(
        replace(kernel, **changes) if kernel.name == "flash_torch" else kernel for kernel in table
    )
    try:
        yield
    finally:
        kernels.KERNELS = table


def checked(rank, group, changes, options):
    """Exit status and what is printed on a rank, of a check with a changed kernel."""
    said = io.StringIO()
    with in_place_of_flash_torch(**changes), contextlib.redirect_stdout(said):
        status = check.main(kernels=["flash_torch"], speeds=False, **options)
    return status, said.getvalue()


def benched(rank, group, changes, ranks, options):
    """The table as rows (on rank 0) and what is printed; changes are made on some ranks."""
    said = []
    with in_place_of_flash_torch(**(changes if rank in ranks else {})):
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


# --- what is read off other programs --------------------------------------------------------------


def test_links_are_read_off_nvidia_smi():
    text = (
        "\t\x1b[4mGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
        "GPU0\t X \tNV18\tSYS\t0-15\t0\nGPU1\tNV18\t X \tSYS\t0-15\t0\nGPU2\tSYS\tSYS\t X \t0\t0\n"
        "\nLegend:\n  X = Self\n"
    )
    assert cluster.matrix_of_links(text) == [
        "links: NV18 (18 NVLinks) for 2 of 6 directed pairs",
        "links: SYS (PCIe or the host's memory) for 4 of 6 directed pairs",
    ]
    assert cluster.matrix_of_links("nvidia-smi has failed") == []


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate", "fewer tokens"),
        ("OutOfResources: out of resource: shared memory", "tune"),
        ("DistNetworkError: The server socket ... EADDRINUSE", "--standalone"),
        ("DistBackendError: NCCL error in: ...", "NCCL_DEBUG"),
    ],
)
def test_known_errors_come_with_advice(said, remedy):
    assert remedy in (advice(said) or "")
    assert advice("something else") is None


def test_the_marks_are_those_of_the_lab():
    assert check.MARKS["bfloat16"] == (1e-2, 5e-2)
    assert check.MARKS["float32"][0] == 1e-5
    assert torch.finfo(torch.float32).eps < check.MARKS["float32"][1]
