"""Attention in FP8: its errors on data with outliers, and its time beside bfloat16.

    python -m benchmarks fp8                            on this GPU
    python -m benchmarks fp8 --head-dim 128 --save NAME a part of it, saved

Errors are against the float64 oracle, on two kinds of data:

    scattered   N(0, 1), and with probability 0.001 plus N(0, 100): section 4.3 of FlashAttention-3
    channels    N(0, 1), with two channels of q and k ten times as large; scores of variance 1

A time in FP8 counts everything: rotation, rounding, the transposed copy of V, and the kernel. Its
row "rounding" is all that without the kernel.
"""

import argparse
import itertools
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from benchmarks.runner import Call, Trial, in_turns, not_measured, numbers, run
from labsupport.attention import attention, oracle_attention, standard_attention
from labsupport.attention.accuracy import relative_error
from labsupport.attention.fp8 import fp8_attention
from labsupport.checks.ex_1_7_fp8 import round_to_fp8
from labsupport.profiling import grids
from labsupport.profiling.grids import refusal
from labsupport.profiling.timing import resolve_device

# The rows of `fp8_attention`: is the input rotated?
FP8 = {"fp8": False, "fp8 rotated": True}


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seqlen", type=numbers, default=[1024, 2048, 4096, 8192, 16_384])
    add("--head-dim", type=numbers, default=[64, 128])
    add("--tokens", type=int, default=16_384, help="per timed call")
    add("--hidden", type=int, default=2048, help="heads times head_dim")
    add("--error-seqlen", type=int, default=4096, help="tokens of each of four heads")
    add("--seconds", type=float, default=0.2, help="of kernels, for one row")


def measure(options: argparse.Namespace) -> pd.DataFrame:
    """Measure errors, then times.

    Returns:
        A row for each implementation and kind of data ("scattered", "channels", or "timed"):
        head_dim, seqlen, causal, status, reason, and

        - of the errors: relative_error (Frobenius), rmse;
        - timed: median_ms, q1_ms, q3_ms, repeats, in_graph, tflops at the median.
    """
    device = resolve_device(options.device)
    errors = [
        Trial(
            {"data": data, "head_dim": d, "seqlen": options.error_seqlen, "causal": False},
            partial(_errors, data, d, options.error_seqlen, device),
        )
        for data, d in itertools.product(DATA, options.head_dim)
    ]
    shapes = [
        grids.Case(
            "fp8", n, batch=max(1, options.tokens // n), heads=options.hidden // d, head_dim=d,
            dtype="bfloat16", causal=causal,
        )
        for d, causal, n in itertools.product(options.head_dim, (False, True), options.seqlen)
    ]  # fmt: skip
    timed = [
        Trial(
            {"data": "timed", "head_dim": s.head_dim, "seqlen": s.seqlen, "causal": s.causal},
            partial(_times, s, device, options.seconds),
        )
        for s in shapes
    ]
    return run([*errors, *timed], device, seed=0)


def scattered(seqlen: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor, float]:
    """Return q, k, v (1, seqlen, 4, head_dim), float64, and the scale of the scores."""
    generator = torch.Generator().manual_seed(0)
    shape = 3, 1, seqlen, 4, head_dim
    x, outliers = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    q, k, v = x + 10 * outliers * (torch.rand(shape, generator=generator) < 0.001)
    return q, k, v, head_dim**-0.5


def channels(seqlen: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor, float]:
    """Return the same with two large channels of q and k."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, seqlen, 4, head_dim, generator=generator, dtype=torch.float64)
    for x in (q, k):
        x[..., [3, 40]] *= 10
    return q, k, v, (head_dim - 2 + 2 * 10**4) ** -0.5


DATA = {"scattered": scattered, "channels": channels}


def rounded_weights(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Textbook attention whose weights are rounded to e4m3, as `fp8_attention` rounds them.

    Takes q, k, v (..., seqlen, head_dim), float32, and the options of `standard_attention`.
    """
    _, weights = standard_attention(q, k, v, **options)
    weights = weights * (256 / weights.amax(-1, keepdim=True).clamp(min=1e-30))
    rounded = weights.to(torch.float8_e4m3fn).float()
    return rounded @ v / weights.sum(-1, keepdim=True).clamp(min=1e-30)


def _errors(data: str, head_dim: int, seqlen: int, device: torch.device) -> list[dict[str, Any]]:
    *drawn, scale = DATA[data](seqlen, head_dim)
    half = [x.to(device, torch.bfloat16) for x in drawn]  # what all of them are given
    by_head = [x.transpose(1, 2) for x in half]
    exact = oracle_attention(*by_head, softmax_scale=scale)[0].transpose(1, 2)

    def textbook(dtype: torch.dtype) -> Tensor:
        return standard_attention(*(x.to(dtype) for x in by_head), softmax_scale=scale)[0]

    def in_fp8() -> Tensor:
        return rounded_weights(*(round_to_fp8(x.float()) for x in by_head), softmax_scale=scale)

    calls: dict[str, Call] = {
        "textbook float16": lambda: textbook(torch.float16).transpose(1, 2),
        "textbook bfloat16": lambda: textbook(torch.bfloat16).transpose(1, 2),
        "textbook FP8, one scale": lambda: in_fp8().transpose(1, 2),
        "flash_gluon": partial(attention, *half, softmax_scale=scale, backend="flash_gluon"),
        **{
            name: partial(fp8_attention, *half, softmax_scale=scale, rotate=rotate)
            for name, rotate in FP8.items()
        },
    }
    rows = []
    for name, call in calls.items():
        try:
            out = call().double()
            found = {"relative_error": relative_error(out, exact)}
            found["rmse"] = (out - exact).pow(2).mean().sqrt().item()
        except Exception as problem:
            found = refusal(problem)
        rows.append({"implementation": name, **found})
    return rows


def _times(shape: grids.Case, device: torch.device, seconds: float) -> list[dict[str, Any]]:
    # Drawn on the device: on a CPU it takes longer than the measurement.
    sizes = 3, shape.batch, shape.seqlen, shape.heads, shape.head_dim
    q, k, v = torch.randn(sizes, device=device, dtype=torch.bfloat16)
    calls: dict[str, Call] = {
        name: partial(attention, q, k, v, causal=shape.causal, backend=name)
        for name in ("flash_gluon", "sdpa_cudnn")
    }
    for name, rotate in FP8.items():
        calls[name] = partial(fp8_attention, q, k, v, causal=shape.causal, rotate=rotate)
    calls["rounding"] = partial(_rounding, q, k, v)
    rows = in_turns(calls, device, seconds, min_seconds=seconds)
    for name, row in rows.items():
        if "median_ms" in row and name != "rounding":
            row["tflops"] = shape.flops() / row["median_ms"] / 1e9
    return [{"implementation": name, **row} for name, row in rows.items()]


def _rounding(q: Tensor, k: Tensor, v: Tensor) -> Any:
    from labsupport.attention.kernels.forward_fp8 import round_inputs  # defines kernels

    return round_inputs(q, k, v, None)


def show(table: pd.DataFrame, options: argparse.Namespace) -> str:
    ran = table[table.status == "ok"]
    errors, timed = ran[ran.data != "timed"], ran[ran.data == "timed"]
    lines = [table.attrs["provenance"]["device"]]
    for part, index, column, digits in (
        (errors, ["implementation"], "relative_error", 4),
        (timed, ["head_dim", "causal", "seqlen"], "median_ms", 3),
        (timed, ["head_dim", "causal", "seqlen"], "tflops", 0),
    ):
        if column in part:
            columns = ["data", "head_dim"] if part is errors else ["implementation"]
            wide = part.pivot_table(index=index, columns=columns, values=column, sort=False)
            lines += [column, wide.round(digits).to_string(na_rep="-")]
    return "\n".join(lines + not_measured(table, "implementation"))
