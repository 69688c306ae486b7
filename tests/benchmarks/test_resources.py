"""What the compiler makes of the Triton kernels: compiled here for GPUs that are elsewhere."""

from importlib.util import find_spec

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.resources import LIMITS, compile_report
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
@pytest.mark.slow
def test_tf32_is_seen_on_the_tensor_cores_and_tiles_too_large_for_their_warps_to_spill():
    call = {"head_dims": [64], "dtypes": [torch.float32], "kernels": ["forward"]}
    tf32 = compile_report(**call, precision="tf32")
    assert (tf32["hgmma"] + tf32["hmma"] > 0).all(), tf32
    narrow, wide = KernelConfig(128, 64, 4, 3), KernelConfig(128, 64, 8, 3)
    table = compile_report(
        capabilities=[90], head_dims=[128], dtypes=BF16, kernels=["forward"], tilings=[narrow, wide]
    )
    assert list(table["warps"]) == [4, 8]
    assert list(table["spilled_bytes"] > 0) == [True, False]
    assert list(table["local"] > 0) == [True, False]


def test_programs_on_a_multiprocessor():
    for registers, shared_kib, warps, programs, what_decides in (
        (32, 0, 4, 16, "64 warps a multiprocessor"),
        (32, 0, 1, 32, "32 programs a multiprocessor"),
        (255, 0, 4, 2, "registers: 256 are given for 255"),
        (80, 0, 1, 24, "registers: a quarter has room for 6.4 warps"),
        (32, 56, 4, 4, "shared memory: 57 of 228 KiB"),
        (32, 227, 4, 1, "shared memory"),
        (32, 228, 4, 0, "1 KiB of shared memory is taken"),
    ):
        assert LIMITS[90].fitting(registers, shared_kib * 1024, warps) == programs, what_decides


@needs_triton
def test_the_command_shows_that_true_float32_stays_off_the_tensor_cores(capsys):
    small = "--capability 80 --head-dim 64 --dtype float32 --kernel forward"
    main(["resources", *small.split()])
    heading, numbers = (line.split() for line in capsys.readouterr().out.splitlines())
    row = dict(zip(heading, numbers, strict=True))
    assert (row["capability"], row["kernel"], row["head_dim"]) == ("80", "forward", "64")
    assert (row["hgmma"], row["hmma"]) == ("0", "0")
    assert int(row["exp2"]) > 0
    with pytest.raises(SystemExit):
        main(["resources", "--dtype", "int8"])
    assert "there is no int8, only bfloat16, float16, float32" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="capability 90"):
        main(["resources", "--capability", "80", "--hopper"])
