"""Training steps with a sharded sequence, measured on processes."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks.__main__ import main
from benchmarks.sequence_parallel import Case, measure_case, row_of
from labsupport.distributed import cleanup_ddp, setup_ddp
from labsupport.distributed.launch import launch
from labsupport.paths import project_root
from labsupport.profiling.runs import load_run
from labsupport.training import PRESETS

CASE = Case("tiny", 256, rung=3)


def measured():
    setup_ddp()
    cases = [CASE, replace(CASE, kernel="native", layout="contiguous"), replace(CASE, kernel="fa4")]
    rows = [measure_case(case, 2) for case in cases]
    cleanup_ddp()
    return rows


def test_a_case_is_measured_the_same_on_all_ranks():
    first, second = launch(measured, processes=2, device="cpu", timeout=30)
    assert first == second
    zigzag, contiguous, refused = first
    config = PRESETS["tiny"]
    for row in (zigzag, contiguous):
        seconds = row["median_ms"] / 1000
        assert row["tokens_per_s"] == pytest.approx(256 / seconds)
        work = 7 * config.layers * 256**2 * config.width
        assert row["attention_tflops"] == pytest.approx(work / seconds / 2 / 1e12)
        assert row["tflops"] > row["attention_tflops"]
        assert row["q1_ms"] <= row["median_ms"] <= row["q3_ms"]
        assert row["peak_memory_bytes"] == max(map(int, row["peak_memory_by_rank"].split()))
    assert (zigzag["kernel"], contiguous["kernel"]) == ("flash_torch", "native")
    assert zigzag["loss"] == pytest.approx(contiguous["loss"], rel=1e-3)
    assert refused["status"] == "unsupported"
    assert "fa4" in refused["reason"]
    assert row_of(CASE, 4)["seqlen_per_rank"] == 64


def test_under_torchrun_rank_0_shows_and_saves(tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("pyproject.toml", "labsupport", "benchmarks", "data/hardware.csv"):
        (tmp_path / name).symlink_to(project_root() / name)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ["--device", "cpu", "--lengths", "64", "--repeats", "1", "--save", "two"]
    done = subprocess.run(
        [*torchrun, "-m", "benchmarks", "sequence_parallel", *options],
        cwd=project_root(), env=os.environ | {"LABSUPPORT_ROOT": str(tmp_path)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tiny, 64 tokens") == 1
    run = load_run("two", folder=tmp_path / "data/runs")
    assert run[["world", "status"]].values.tolist() == [[2, "ok"]]
    command = run.attrs["provenance"]["command"]
    assert command.startswith("torchrun --nproc-per-node 2 -m benchmarks sequence_parallel")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--layouts", "zigzg"], "there is no zigzg, only zigzag, contiguous"),
        (["--rung", "99"], "invalid choice: 99"),
        (["--kernels", "native,flash"], "there is no flash, only auto, cudnn, native"),
        (["--preset", "huge"], "invalid choice: 'huge'"),
    ],
)
def test_a_case_that_does_not_exist_is_refused_before_anything_starts(wrong, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["sequence_parallel", *wrong])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def limited():
    setup_ddp()
    row = measure_case(Case("gpt2-small", 1024, limit="1500MiB"))
    cleanup_ddp()
    return row


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory_limit is Linux's")
def test_a_case_without_enough_memory_is_a_row():
    row = launch(limited, processes=2, device="cpu", timeout=60)[0]
    assert row["status"] == "out of memory"
    assert "does not fit into the limit of 1.5 GiB" in row["reason"]
