"""What the compiler makes of the Triton kernels: compiled here for GPUs that are elsewhere."""

from importlib.util import find_spec

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.resources import LIMITS, compile_report, neighbours, show
from labsupport.attention.kernels.config import KernelConfig

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
BF16 = [torch.bfloat16]


@needs_triton
@pytest.mark.slow
def test_the_causal_kernels_for_hopper_use_its_tensor_cores_and_do_not_spill():
    table = compile_report(
        capabilities=[90], head_dims=[64, 128], dtypes=BF16, causal=True, hopper=True
    )
    assert list(table["kernel"]) == [k for k in ("forward", "keys", "queries") for _ in range(2)]
    _check_hopper(table)


def _check_hopper(table):
    assert (table["status"] == "ok").all(), table
    assert (table["hgmma"] > 0).all(), table
    assert (table[["hmma", "spilled_bytes", "local"]] == 0).all(axis=None), table
    assert (table["programs"] >= 1).all(), table


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(("capability", "shared_kib"), [(80, 163), (86, 99), (90, 227)])
def test_every_tiling_fits_on_a_multiprocessor(capability, shared_kib):
    table = compile_report(capabilities=[capability], causal=True, grouped=True)
    assert len(table) == 3 * 3 * 2
    assert (table["programs"] >= 1).all(), table
    assert (table["shared_kib"] <= shared_kib).all(), table


@needs_triton
def test_true_float32_stays_off_the_tensor_cores_and_tf32_does_not():
    call = {"head_dims": [64], "dtypes": [torch.float32], "kernels": ["forward"]}
    ieee = compile_report(**call, precision="ieee")
    tf32 = compile_report(**call, precision="tf32")
    assert (ieee[["hgmma", "hmma"]] == 0).all(axis=None), ieee
    assert (tf32["hgmma"] + tf32["hmma"] > 0).all(), tf32


@needs_triton
def test_tiles_too_large_for_their_warps_are_seen_to_spill():
    narrow, wide = KernelConfig(128, 64, 4, 3), KernelConfig(128, 64, 8, 3)
    table = compile_report(
        capabilities=[90], head_dims=[128], dtypes=BF16, kernels=["forward"], tilings=[narrow, wide]
    )
    assert list(table["warps"]) == [4, 8]
    assert list(table["spilled_bytes"] > 0) == [True, False]
    assert list(table["local"] > 0) == [True, False]


@needs_triton
@pytest.mark.slow
def test_what_the_compiler_cannot_do_is_reported_beside_what_it_can():
    table = compile_report(
        capabilities=[80], head_dims=[64], dtypes=BF16, kernels=["forward"],
        tilings=[KernelConfig(64, 48, 4, 1), KernelConfig(64, 64, 4, 1)],
    )  # fmt: skip
    assert list(table["status"]) == ["failed", "ok"]
    assert list(table["registers"].isna()) == [True, False]
    assert "power of 2" in show(table)


@pytest.mark.parametrize(
    ("registers", "shared_kib", "warps", "programs", "what_decides"),
    [
        (32, 0, 4, 16, "64 warps a multiprocessor"),
        (32, 0, 1, 32, "32 programs a multiprocessor"),
        (255, 0, 4, 2, "registers: 256 are given for 255"),
        (80, 0, 1, 24, "registers: a quarter has room for 6.4 warps"),
        (32, 56, 4, 4, "shared memory: 57 of 228 KiB"),
        (32, 227, 4, 1, "shared memory"),
        (32, 228, 4, 0, "1 KiB of shared memory is taken"),
    ],
)
def test_programs_on_a_multiprocessor(registers, shared_kib, warps, programs, what_decides):
    assert LIMITS[90].fitting(registers, shared_kib * 1024, warps) == programs, what_decides


def test_neighbours_differ_in_one_number():
    plan = KernelConfig(64, 16, 8, 1)
    around = neighbours(plan)
    assert KernelConfig(128, 16, 8, 1) in around
    assert KernelConfig(64, 32, 8, 1) in around
    assert KernelConfig(64, 16, 4, 1) in around
    assert KernelConfig(64, 16, 8, 2) in around
    assert all(min(t.block_q, t.block_k) >= 16 and t.stages >= 1 for t in around)
    for t in around:
        assert sum(a != b for a, b in zip(vars(t).values(), vars(plan).values(), strict=True)) == 1


@needs_triton
def test_the_kernels_for_hopper_are_compiled_for_nothing_else():
    with pytest.raises(ValueError, match="capability 90"):
        compile_report(capabilities=[80], hopper=True)


@needs_triton
def test_the_command_prints_a_table_and_refuses_what_is_not_known(capsys):
    small = "--capability 90 --head-dim 64 --dtype bfloat16 --kernel queries"
    main(["resources", *small.split()])
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.split()[:3] == ["capability", "kernel", "head_dim"]
    assert row.split()[:3] == ["90", "queries", "64"]
    with pytest.raises(SystemExit):
        main(["resources", "--dtype", "int8"])
    assert "there is no int8, only bfloat16, float16, float32" in capsys.readouterr().err
