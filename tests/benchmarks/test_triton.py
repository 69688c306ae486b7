"""Programs about the Triton kernels: right results only, and what they choose and count."""

from functools import partial
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

from benchmarks import decode, fp8, loop_orders, peers, resources
from benchmarks.__main__ import main, parser_of
from benchmarks.traffic import kernel_bytes
from labsupport.attention.kernels import mode, version1
from labsupport.attention.kernels.config import KernelConfig, decode_tiling, override, tiling
from labsupport.profiling.grids import Case

runs_kernels = pytest.mark.skipif(mode.missing() is not None, reason=str(mode.missing()))
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
SMALL, LARGE = KernelConfig(16, 16, 4, 1), KernelConfig(32, 32, 4, 1)


def measure(program, options):
    options = parser_of(program.__name__.split(".")[-1]).parse_args(options.split())
    table = program.measure(options)
    return table, program.show(table, options)


# --- fp8 -----------------------------------------------------------------------------------------


def test_errors_of_textbook_attention_grow_from_float16_to_fp8_and_refusals_are_rows():
    options = "--device cpu --seqlen 64 --tokens 64 --error-seqlen 64 --head-dim 64"
    table, printed = measure(fp8, options)
    for _, rows in table[table.data != "timed"].groupby("data"):
        errors = rows.set_index("implementation").relative_error
        half, quarter = errors["textbook bfloat16"], errors["textbook FP8, one scale"]
        assert 4 * errors["textbook float16"] < half < quarter / 4
        assert errors[["fp8", "fp8 rotated"]].isna().all()
    assert "fp8 rotated: unsupported: attention in FP8 needs a GPU" in printed


# --- exercise 4-3 ---------------------------------------------------------------------------------


@runs_kernels
def test_the_committed_solution_of_exercise_4_3_computes_attention():
    q, k, v = torch.randn(3, 2, 2, 40, 16, device="cpu" if mode.interpreted() else "cuda")
    out = peers.committed_solution()(q, k, v, True)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, expected, atol=2e-3, rtol=2e-3)


# --- decode and loop_orders ----------------------------------------------------------------------


@runs_kernels
def test_every_implementation_is_a_row_and_ratios_are_against_the_fastest_sdpa():
    options = "--keys 70,20 --batch 1 --peers sdpa_flash,sdpa_efficient,fa3 --max-seconds 0.01"
    table, printed = measure(decode, options)
    names = ["decode", "sdpa_flash", "sdpa_efficient", "fa3"]
    assert list(table.implementation) == names * 2
    ran = table[table.status == "ok"]
    assert set(ran.implementation) >= {"decode", "sdpa_flash"}
    assert (ran.relative_error < (1e-5 if mode.interpreted() else 1e-2)).all()
    itemsize = 4 if mode.interpreted() else 2
    read_once = ran["batch"] * ran["keys"] * ran.kv_heads * ran.head_dim * 2 * itemsize
    assert (ran.gb_s * ran.median_ms * 1e6).tolist() == pytest.approx(read_once.tolist())
    for _, shape in ran.set_index("implementation").groupby("keys"):
        ratio = shape.median_ms["sdpa_flash"] / shape.median_ms["decode"]
        assert shape.times_sdpa["decode"] == pytest.approx(ratio)
    reasons = table.set_index(["keys", "implementation"]).reason
    assert "grouped-query heads" in reasons[20, "sdpa_efficient"]
    assert "sdpa_efficient: unsupported: " in printed
    assert "unknown backend" in printed
    assert ("times mean nothing" in printed) == mode.interpreted()


@runs_kernels
def test_a_wrong_result_is_not_timed(monkeypatch):
    """A kernel that is fast because it leaves out half of the keys must not win."""
    right = decode.decode
    monkeypatch.setattr(decode, "decode", lambda q, k, v: right(q, k[:, ::2], v[:, ::2]))
    table, printed = measure(decode, "--keys 20 --batch 1 --peers decode")
    (row,) = table.itertuples()
    assert row.status == "wrong"
    assert row.relative_error > 0.05
    assert "median_ms" not in table
    assert "wrong" in printed


@pytest.mark.slow
@runs_kernels
def test_both_loop_orders_are_measured_and_agree_or_are_not_compared(monkeypatch):
    options = "--tokens 32 --head-dim 16 --max-seconds 0.001"
    monkeypatch.setattr(loop_orders, "FEW", ((2, 2),))
    table, printed = measure(loop_orders, options)
    assert list(table.version1_programs) == [4, 4]
    assert (table.difference < (1e-5 if mode.interpreted() else 0.05)).all()
    assert table.ratio.tolist() == (table.version1_ms / table.version2_ms).tolist()
    assert table.order_ratio.tolist() == (table.version1_ms / table.same_tiles_ms).tolist()
    assert "order_ratio" in printed

    right = version1.forward_version1
    other = lambda *qkv, causal: right(*qkv, causal=not causal)  # noqa: E731
    monkeypatch.setattr(version1, "forward_version1", other)
    _, printed = measure(loop_orders, options)
    assert "failed: AssertionError" in printed
    assert "order_ratio" not in printed


def test_version_one_moves_each_row_of_o_m_and_l_once_for_each_block_of_keys_that_it_sees():
    tiles = KernelConfig(64, 64, 4, 1)
    shape = loop_orders.LoopShape(batch=2, heads=3, seqlen=256, head_dim=64, causal=False)
    assert loop_orders.rewritten_bytes(shape, tiles) == 4 * 6 * 256 * (64 + 2) * 4 * 2
    causal = loop_orders.LoopShape(batch=1, heads=1, seqlen=256, head_dim=62, causal=True)
    seen = 256 + 192 + 128 + 64  # rows that see each of four blocks of keys
    assert loop_orders.rewritten_bytes(causal, tiles) == seen * 64 * 4 * 2


# --- tune ----------------------------------------------------------------------------------------


def test_an_override_holds_inside_of_its_block_only_even_after_an_error():
    forward = partial(tiling, head_dim=64, dtype=torch.bfloat16, interpreted=False)
    before = forward("forward")
    with pytest.raises(KeyError), override(forward=SMALL):
        with override(keys=LARGE):
            assert (forward("forward"), forward("keys")) == (SMALL, LARGE)
        assert forward("keys") != LARGE
        raise KeyError
    assert forward("forward") == before
    with override(decode=SMALL):
        assert decode_tiling(4, 128, torch.bfloat16) == SMALL
    assert decode_tiling(4, 128, torch.bfloat16) != SMALL


# --- traffic: bytes of the kernels ----------------------------------------------------------------

CASE = Case("flash_triton", 4096, batch=4, heads=16, head_dim=128, dtype="bfloat16")


def test_bytes_that_ncu_recorded_on_an_h200_are_the_compulsory_ones_and_fewer_in_the_l2():
    """`data/runs/peers-h200/notes.md`, tiles of 64 x 64: requests are coalesced on their way."""
    for kernel, megabytes in (("forward", 262), ("keys", 391), ("queries", 331), ("rows", 139)):
        compulsory = kernel_bytes(kernel, CASE, 64, 64).compulsory
        assert megabytes * 1e6 / compulsory == pytest.approx(1, abs=0.04), kernel
    for kernel, gigabytes, share in (("forward", 7.35, 0.84), ("keys", 6.84, 0.76)):
        counted = kernel_bytes(kernel, CASE, 64, 64)
        total = counted.read + counted.written
        assert gigabytes * 1e9 / total == pytest.approx(share, abs=0.01), kernel


# --- resources: compiled here for GPUs that are elsewhere -----------------------------------------


@needs_triton
@pytest.mark.slow
def test_the_causal_kernels_for_hopper_use_its_tensor_cores_and_do_not_spill():
    options = "--capability 90 --head-dim 64,128 --dtype bfloat16 --causal --hopper"
    table, _ = measure(resources, options)
    assert list(table["kernel"]) == [k for k in ("forward", "keys", "queries") for _ in range(2)]
    assert (table["status"] == "ok").all(), table
    assert (table["hgmma"] > 0).all(), table
    assert (table[["hmma", "spilled_bytes", "local"]] == 0).all(axis=None), table
    assert (table["programs"] >= 1).all(), table


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(("capability", "shared_kib"), [(80, 163), (86, 99), (90, 227)])
def test_every_tiling_fits_on_a_multiprocessor(capability, shared_kib):
    table, _ = measure(resources, f"--capability {capability} --causal")
    assert len(table) == 3 * 3 * 2
    assert (table["programs"] >= 1).all(), table
    assert (table["shared_kib"] <= shared_kib).all(), table


@needs_triton
@pytest.mark.slow
def test_true_float32_stays_off_the_tensor_cores(capsys):
    options = "--capability 80 --head-dim 64 --dtype float32 --kernel forward"
    main(["resources", *options.split()])
    heading, numbers = (line.split() for line in capsys.readouterr().out.splitlines())
    row = dict(zip(heading, numbers, strict=True))
    assert (row["capability"], row["kernel"], row["head_dim"]) == ("80", "forward", "64")
    assert (row["hgmma"], row["hmma"]) == ("0", "0")
    assert int(row["exp2"]) > 0
