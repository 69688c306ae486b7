import json
import math
import os
import subprocess
import sys
from itertools import product

import pytest
import torch

from benchmarks.resources import LIMITS
from labsupport.attention import (
    AttentionInputError,
    BackendUnavailableError,
    compare_with_oracle,
    merge_attention,
    oracle_attention,
)
from labsupport.attention.kernels import mode
from labsupport.attention.kernels.decode import (
    MERGED_AT_ONCE,
    RESIDENT,
    choose_splits,
    decode,
    tiling,
)
from labsupport.attention.reference import banded_attention
from tests.attention.cases import make_model_qkv, to_math_layout

DEVICE = "cpu" if mode.interpreted() else "cuda"
DTYPES = [torch.float32, torch.float16, *([] if mode.interpreted() else [torch.bfloat16])]

runs_kernels = pytest.mark.skipif(mode.missing() is not None, reason=str(mode.missing()))


def make_cache(batch=2, seqlen_q=1, seqlen_k=300, heads=8, kv_heads=1, head_dim=64, **options):
    tensors = make_model_qkv(
        batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, device=DEVICE, **options
    )
    return [tensor.detach() for tensor in tensors]


def by_sequence(function, q, k, v, lengths, slopes, options):
    """Out (batch, seqlen_q, heads, head_dim) and lse of `function`, each sequence by itself."""
    outs, lses = [], []
    for b, length in enumerate(lengths):
        out = q.new_zeros(q.shape[1:]).transpose(0, 1)
        lse = torch.full(out.shape[:-1], -torch.inf, device=q.device)
        if length:
            tensors = (q[b : b + 1], k[b : b + 1, :length], v[b : b + 1, :length])
            own = None if slopes is None else slopes.expand(len(q), -1)[b]
            out, lse = function(*to_math_layout(*tensors), alibi_slopes=own, **options)
            out, lse = out[0], lse[0]
        outs.append(out.transpose(0, 1))
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def textbook(*qkv, **options):
    return banded_attention(*qkv, return_lse=True, **options)


def assert_obeys_error_rule(
    q, k, v, *, splits=None, lengths=None, slopes=None, causal=True, **options
):
    cache_seqlens = None if lengths is None else torch.tensor(lengths, device=q.device)
    out, lse = decode(
        q, k, v, cache_seqlens=cache_seqlens, alibi_slopes=slopes, splits=splits,
        return_lse=True, causal=causal, **options,
    )  # fmt: skip
    assert (out.dtype, out.shape) == (q.dtype, q.shape)
    assert lse.dtype == torch.float32

    call = q, k, v, lengths or [k.shape[1]] * len(q), slopes, {**options, "causal": causal}
    expected, expected_lse = by_sequence(textbook, *call)
    exact, exact_lse = by_sequence(oracle_attention, *call)
    report = compare_with_oracle(out, expected, exact)
    assert report.ok, f"output: {report}"
    empty = exact_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    assert not out.transpose(1, 2)[empty].any()
    report = compare_with_oracle(lse[~empty], expected_lse[~empty], exact_lse[~empty])
    assert report.ok, f"lse: {report}"


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [None, 1, 3, 8])
def test_any_number_of_splits_obeys_the_error_rule(splits, dtype):
    q, k, v = make_cache(seqlen_q=3, heads=4, kv_heads=2, dtype=dtype)  # 5 tiles of keys at most
    assert_obeys_error_rule(q, k, v, splits=splits)


@runs_kernels
def test_more_splits_than_are_merged_at_once_are_rescaled_to_the_largest():
    splits, head_dim = MERGED_AT_ONCE + 4, 256
    keys = splits * tiling(1, head_dim, torch.float32).block_k
    q, k, v = make_cache(1, 1, keys, 1, 1, head_dim)
    k += q * torch.linspace(-0.5, 0.5, keys, device=DEVICE)[:, None, None]  # scores rise
    assert_obeys_error_rule(q, k, v, splits=splits)


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 1), (4, 2), (3, 3)])
@pytest.mark.parametrize("seqlen_q", [1, 3, 7])
def test_grouped_heads_and_several_queries_obey_the_error_rule(seqlen_q, heads, kv_heads, dtype):
    q, k, v = make_cache(1, seqlen_q, 203, heads, kv_heads, dtype=dtype)
    assert_obeys_error_rule(q, k, v, splits=2)


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 80, 128, 256])
def test_head_dims_obey_the_error_rule(head_dim, dtype):
    q, k, v = make_cache(1, 2, 150, 4, 2, head_dim, dtype=dtype)
    assert_obeys_error_rule(q, k, v, splits=2)


@runs_kernels
def test_more_rows_than_a_tile_holds_are_cut_into_several():
    q, k, v = make_cache(1, 16, 70, 8, 1, 32, dtype=torch.float16)
    assert tiling(16 * 8, 32, torch.float16).block_q < 16 * 8
    assert_obeys_error_rule(q, k, v, splits=2)


@runs_kernels
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window_size", [(-1, -1), (20, -1), (100, 0), (0, 0), (130, 2), (-1, 1)])
def test_windows_obey_the_error_rule(window_size, causal, splits):
    q, k, v = make_cache(1, 3, 300, 4, 2, 32)
    assert_obeys_error_rule(q, k, v, splits=splits, window_size=window_size, causal=causal)


@runs_kernels
def test_a_window_as_wide_as_an_integer_hides_nothing():
    q, k, v = make_cache(1, 3, 70, 2, 1, 32)
    wide = decode(q, k, v, causal=False, window_size=(2**31 - 1, 2**31 - 1))
    assert torch.equal(wide, decode(q, k, v, causal=False))


@runs_kernels
@pytest.mark.parametrize("per_sequence", [False, True])
def test_alibi_obeys_the_error_rule(per_sequence):
    q, k, v = make_cache(seqlen_q=3, heads=4, kv_heads=2)
    slopes = torch.tensor([[0.5, 0.25, 0.1, 0.02], [0.3, 0.2, 0.04, 0.01]], device=DEVICE)
    slopes = slopes if per_sequence else slopes[0]
    assert_obeys_error_rule(q, k, v, splits=3, slopes=slopes, lengths=[300, 170])


@runs_kernels
def test_softmax_scale_is_used():
    q, k, v = make_cache(1, 2, 100, 2, 1, 32)
    assert_obeys_error_rule(q, k, v, splits=2, softmax_scale=0.5)


@runs_kernels
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("options", [{}, {"window_size": (30, -1)}, {"causal": False}])
def test_each_sequence_ends_at_its_own_length_and_nothing_is_read_behind_it(options, splits):
    lengths = [300, 0, 1, 64, 129]  # 1 key for 3 queries: two of them see nothing
    q, k, v = make_cache(5, 3, 300, 2, 1, 32)
    for cache, (sequence, length) in product((k, v), enumerate(lengths)):
        cache[sequence, length:] = torch.nan
    assert_obeys_error_rule(q, k, v, splits=splits, lengths=lengths, **options)


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_of_any_kind_give_the_same_result(dtype):
    q, k, v = make_cache(seqlen_q=3, heads=4, kv_heads=2, dtype=dtype)
    expected = decode(q, k, v, splits=2)
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    every_second = [torch.stack((t, t), dim=-1)[..., 0] for t in (q, k, v)]  # number of a head
    every_third = [torch.repeat_interleave(t, 3, dim=1)[:, ::3] for t in (q, k, v)]
    for strided in (heads_first, every_second, every_third):
        assert not strided[1].is_contiguous()
        torch.testing.assert_close(decode(*strided, splits=2), expected)


@runs_kernels
def test_a_batch_can_share_one_cache():
    q, k, v = make_cache(seqlen_q=2, heads=4, kv_heads=2)
    shared = [t[:1].expand(2, -1, -1, -1) for t in (k, v)]
    copied = [t.contiguous() for t in shared]
    torch.testing.assert_close(decode(q, *shared, splits=2), decode(q, *copied, splits=2))


@runs_kernels
def test_parts_of_a_cache_merge_in_float32_into_the_whole():
    q, k, v = make_cache(1, 1, 200, 4, 2, dtype=torch.float16)
    parts = [
        decode(q, k[:, keys], v[:, keys], causal=False, return_lse=True, float32_out=True)
        for keys in (slice(0, 90), slice(90, 200))
    ]
    (out_a, lse_a), (out_b, lse_b) = ((out.transpose(1, 2), lse) for out, lse in parts)
    assert out_a.dtype == torch.float32
    merged, _ = merge_attention(out_a, lse_a, out_b, lse_b)
    tensors = to_math_layout(q, k, v)
    report = compare_with_oracle(merged, textbook(*tensors)[0], oracle_attention(*tensors)[0])
    assert report.ok, report


@pytest.mark.parametrize(
    ("tiles", "programs", "splits"),
    [(128, 8, 32), (128, 64, 4), (128, 256, 1), (3, 1, 1), (4, 1, 2)],
)
def test_keys_are_split_until_the_gpu_is_full(tiles, programs, splits):
    assert choose_splits(tiles, programs, multiprocessors=132) == splits


def test_no_choice_of_splits_leaves_one_empty_or_needs_a_second_round():
    for tiles, programs in product(range(1, 200), (1, 3, 8, 100, 264, 1000)):
        splits = choose_splits(tiles, programs, multiprocessors=132)
        share = math.ceil(tiles / splits)
        assert (splits - 1) * share < tiles
        assert splits == 1 or (splits * programs <= 2 * 132 and share >= 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 1, 3, 16)}, "kv_heads"),
        ({"k_cache": torch.zeros(1, 9, 2, 16).half()}, "one dtype"),
        ({"cache_seqlens": torch.tensor([10])}, r"0 \.\. 9"),
        ({"cache_seqlens": torch.tensor([-1])}, r"0 \.\. 9"),
        ({"cache_seqlens": torch.tensor([1, 2])}, r"shape \(1,\)"),
        ({"cache_seqlens": torch.tensor([1.0])}, "float32"),
        ({"cache_seqlens": [9]}, "list"),
        ({"cache_seqlens": torch.ones(1, dtype=torch.int32, device="meta")}, "device"),
        ({"window_size": (1, -2)}, "window_size"),
        ({"alibi_slopes": torch.ones(3)}, r"\(4,\)"),
        ({"splits": 0}, "splits"),
        ({"q": torch.zeros(1, 1, 4, 16, requires_grad=True)}, "no backward"),
        (dict.fromkeys(("q", "k_cache", "v_cache"), torch.zeros(1, 1, 4, 16).double()), "float64"),
        (dict.fromkeys(("q", "k_cache", "v_cache"), torch.zeros(1, 1, 4, 257)), "256"),
    ],
)  # fmt: skip
def test_what_cannot_be_decoded_is_refused_with_a_reason(change, message):
    call = {
        "q": torch.zeros(1, 1, 4, 16),
        "k_cache": torch.zeros(1, 9, 2, 16),
        "v_cache": torch.zeros(1, 9, 2, 16),
    }
    with pytest.raises(AttentionInputError, match=message):
        decode(**(call | change))


@pytest.mark.skipif(not mode.interpreted(), reason="compiled, bfloat16 is right")
def test_the_interpreter_refuses_bfloat16_rather_than_compute_it_wrongly():
    q, k, v = make_cache(1, 1, 9, 2, 1, 16, dtype=torch.bfloat16)
    with pytest.raises(BackendUnavailableError):
        decode(q, k, v)


# Runs in a process of its own, because Triton compiles or interprets, once and for all.
COMPILE = """
import json, os, re, subprocess, sys, tempfile
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from labsupport.attention.kernels.decode import merge_kernel, splits_kernel
from labsupport.attention.kernels.decode import MERGED_AT_ONCE, tiling

def resources(kernel, capability, constants, warps, stages):
    signature, aligned = {}, {}
    constants |= {name: 1 for name in kernel.arg_names if re.fullmatch("stride_.d", name)}
    for place, name in enumerate(kernel.arg_names):
        kind = "*bf16" if name in ("Q", "K", "V") else "*fp32" if name[0].isupper() else "i32"
        kind = {"slopes": "*fp32", "cache_seqlens": "*i32", "scale": "fp32"}.get(name, kind)
        signature[name] = "constexpr" if name in constants else kind
        if signature[name].startswith("*") or signature[name] == "i32" and "stride" in name:
            aligned[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r"REG:(\\d+) STACK:(\\d+)", usage).groups())
    return registers, stack, built.metadata.shared

report = []
for capability, head_dim, rows in json.loads(sys.argv[1]):
    plan = tiling(rows, head_dim, torch.bfloat16)
    sizes = {"HEAD_DIM": head_dim, "D": head_dim}
    tile = {"BLOCK_ROWS": plan.block_q, "BLOCK_K": plan.block_k, "PRECISION": "ieee"}
    mask = {"LEFT": True, "RIGHT": True, "ALIBI": True}
    report.append((
        resources(splits_kernel, capability, sizes | tile | mask, plan.warps, plan.stages),
        resources(merge_kernel, capability, sizes | {"BLOCK_SPLITS": MERGED_AT_ONCE}, 4, 3),
    ))
print(json.dumps(report))
"""


def test_compiled_kernels_do_not_spill_and_two_programs_fit_on_a_multiprocessor(project, tmp_path):
    pytest.importorskip("triton")
    script = tmp_path / "compile_decode.py"
    script.write_text(COMPILE)
    cases = [(80, 64, 8), (80, 128, 8), (90, 64, 8), (90, 128, 8), (90, 128, 64)]
    done = subprocess.run(
        [sys.executable, script, json.dumps(cases)],
        env=os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(project)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    for (capability, *case), kernels in zip(cases, report, strict=True):
        for registers, spilled, shared in kernels:
            assert spilled == 0, (capability, case, registers)
            fitting = LIMITS[capability].fitting(registers, shared, warps=4)
            assert fitting >= RESIDENT, (capability, case, registers, shared)
