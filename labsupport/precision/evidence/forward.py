"""What goes wrong in a forward pass: scores, norms, sums, products.

Each function returns a table whose first column names the variants, the failing one first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labsupport.attention.accuracy import max_error, relative_error
from labsupport.attention.backends import available_backends, flash_attention
from labsupport.attention.reference import oracle_attention, standard_attention
from labsupport.attention.registry import FLOAT_DTYPES
from labsupport.precision.dtypes import short
from labsupport.profiling.timing import resolve_device

if TYPE_CHECKING:
    import pandas as pd

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def float16_logits_overflow(value: float = 40.0, head_dim: int = 64) -> pd.DataFrame:
    """QK^T of harmless inputs overflows float16, unless it is accumulated and kept in float32.

    All entries of q and k are `value`: each score is value**2 * head_dim before it is scaled, which
    is 102,400 for the defaults, and 12,800 after. v is unit normal.

    Returns:
        computation, largest score (as stored, or "never stored"), NaN in output (count), max error.
    """
    q = k = torch.full((1, 16, 1, head_dim), value)
    v = torch.randn(1, 16, 1, head_dim, generator=_seed())
    exact = oracle_attention(*(x.transpose(1, 2) for x in (q, k, v)))[0].transpose(1, 2)

    def textbook(dtype: torch.dtype, *, scale_first: bool = False) -> tuple[Tensor, float]:
        q_, k_, v_ = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
        scale = 1 / math.sqrt(head_dim)
        stored = (q_ * scale) @ k_.mT if scale_first else q_ @ k_.mT
        scores = stored if scale_first else stored * scale
        return (scores.softmax(-1) @ v_).transpose(1, 2), stored.max().item()

    rows: list[dict[str, Any]] = []
    flash = flash_attention(q.to(F16), k.to(F16), v.to(F16))
    assert isinstance(flash, Tensor)
    for name, (out, largest) in {
        "textbook, float16": textbook(F16),
        "textbook, float16, q scaled first": textbook(F16, scale_first=True),
        "textbook, bfloat16": textbook(BF16),
        "FlashAttention, float16": (flash, "never stored"),
    }.items():
        rows.append(
            {
                "computation": name,
                "largest score": largest,
                "NaN in output": int(out.isnan().sum()),
                "max error": max_error(out, exact),
            }
        )
    return _table(rows)


def norm_statistics(magnitudes: Sequence[float] = (1e-4, 1.0, 300.0)) -> pd.DataFrame:
    """A mean of squares in float16 overflows from 256 on, and its epsilon underflows.

    RMSNorm of 8 vectors of 768 normal entries of each magnitude, epsilon 1e-8.

    Returns:
        computation, magnitude, non-finite (entries of the output), relative error.
    """
    rows = []
    for magnitude in magnitudes:
        x = torch.randn(8, 768, generator=_seed(), dtype=torch.float64) * magnitude
        half = x.to(F16)
        exact = _rms_norm(half.double())
        for name, out in {
            "by hand, in float16": _rms_norm(half),
            "by hand, statistics in float32": _rms_norm(half.float()).to(F16),
            "F.rms_norm of float16": F.rms_norm(half, (768,), eps=1e-8),
        }.items():
            rows.append(
                {
                    "computation": name,
                    "magnitude": magnitude,
                    "non-finite": int(out.isfinite().logical_not().sum()),
                    "relative error": relative_error(out, exact),
                }
            )
    return _table(sorted(rows, key=lambda row: str(row["computation"])))


def running_sum(entries: int = 4096) -> pd.DataFrame:
    """Softmax's running sum stops growing where 1 is less than half a unit in the last place.

    `entries` equal scores: each adds exp(0) = 1 to the sum, one block of 1 at a time.

    Returns:
        accumulator, sum, weight of each entry (should be 1 / entries), relative error.
    """
    rows = []
    for dtype in (F16, BF16, F32):
        total = torch.zeros((), dtype=dtype)
        for _ in range(entries):
            total += 1
        rows.append(
            {
                "accumulator": short(dtype),
                "sum": total.item(),
                "weight of each entry": 1 / total.item(),
                "relative error": abs(total.item() - entries) / entries,
            }
        )
    return _table(rows)


def error_by_length(
    lengths: Sequence[int] = (128, 512, 2048),
    *,
    head_dim: int = 64,
    device: torch.device | str | None = None,
) -> pd.DataFrame:
    """Error of FlashAttention and of the textbook against float64, by dtype and sequence length.

    One head, unit normal inputs, in float32, float16 and bfloat16 as far as the device runs them.

    Returns:
        dtype, seqlen, standard and flash (maximum errors), ratio, relative (flash's error in norm).
    """
    where = resolve_device(device)
    rows = []
    for seqlen in lengths:
        inputs = [torch.randn(1, seqlen, 1, head_dim, generator=_seed(i)) for i in range(3)]
        for dtype in (F32, F16, BF16):
            q, k, v = (x.to(where, dtype) for x in inputs)
            if not any(s.runs and s.io_aware for s in available_backends(q, k, v)):
                continue
            first = [x.transpose(1, 2) for x in (q, k, v)]
            exact = oracle_attention(*first)[0].transpose(1, 2)
            flash = flash_attention(q, k, v)
            assert isinstance(flash, Tensor)
            textbook = standard_attention(*first)[0].transpose(1, 2)
            errors = max_error(textbook, exact), max_error(flash, exact)
            rows.append(
                {
                    "dtype": short(dtype),
                    "seqlen": seqlen,
                    "standard": errors[0],
                    "flash": errors[1],
                    "ratio": errors[1] / errors[0],
                    "relative": relative_error(flash, exact),
                }
            )
    return _table(rows)


def error_by_scale(
    scales: Sequence[float] = (0.1, 1.0, 10.0, 100.0), *, device: torch.device | str | None = None
) -> pd.DataFrame:
    """The larger the inputs, the larger the scores, and the more rounding the inputs costs.

    Unit normal q, k and v of 512 tokens, times each scale, in half precision by FlashAttention.

    Returns:
        scale, float16 and bfloat16 (maximum error against float64 attention of the float32 inputs,
        over the largest output), largest score.
    """
    where = resolve_device(device)
    unit = [torch.randn(1, 512, 4, 64, generator=_seed(i)) for i in range(3)]
    rows = []
    for scale in scales:
        q, k, v = (x.to(where) * scale for x in unit)
        exact = oracle_attention(*(x.transpose(1, 2) for x in (q, k, v)))[0].transpose(1, 2)
        row: dict[str, Any] = {"scale": scale}
        for dtype in (F16, BF16):
            out = flash_attention(q.to(dtype), k.to(dtype), v.to(dtype))
            assert isinstance(out, Tensor)
            row[short(dtype)] = max_error(out, exact) / exact.abs().max().item()
        scores = q.transpose(1, 2) @ k.transpose(1, 2).mT / math.sqrt(q.shape[-1])
        rows.append(row | {"largest score": scores.abs().max().item()})
    return _table(rows)


def tf32_surprise(size: int = 512, *, device: torch.device | str | None = None) -> pd.DataFrame:
    """A "float32" product that is not: TF32 keeps 11 of float32's 24 significant bits.

    On an NVIDIA GPU from Ampere on, the same call is measured with TF32 off and on. Elsewhere TF32
    is emulated: inputs rounded to 11 significant bits, products accumulated in float32.

    Returns:
        product, how ("measured" or "emulated"), relative error.
    """
    where = resolve_device(device)
    a, b = (torch.randn(size, size, generator=_seed(i)).to(where) for i in range(2))
    exact = a.double() @ b.double()
    has_tf32 = where.type == "cuda" and torch.cuda.get_device_capability(where) >= (8, 0)
    if has_tf32:
        results = [("float32, TF32 allowed", "measured", _matmul(a, b, "high"))]
    else:
        results = [("float32, TF32 allowed", "emulated", _round_tf32(a) @ _round_tf32(b))]
    results += [
        ("float32", "measured", _matmul(a, b, "highest")),
        ("float16", "measured", a.to(F16) @ b.to(F16)),
        ("bfloat16", "measured", a.to(BF16) @ b.to(BF16)),
    ]
    return _table(
        {"product": name, "how": how, "relative error": relative_error(out, exact)}
        for name, how, out in results
    )


def dtype_refusals(device: torch.device | str | None = None) -> pd.DataFrame:
    """Which backend takes which dtype on this device, and what it says otherwise.

    Returns:
        a row a backend, a column a dtype: "runs", or every reason why not.
    """
    where = resolve_device(device)
    columns: dict[str, dict[str, str]] = {}
    for dtype in FLOAT_DTYPES:
        x = torch.zeros(1, 128, 4, 64, dtype=dtype, device=where)
        columns[short(dtype)] = {
            status.name: "runs" if status.runs else "; ".join(status.reasons)
            for status in available_backends(x, x, x)
        }
    import pandas as pd

    return pd.DataFrame(columns).rename_axis("backend").reset_index()


def _rms_norm(x: Tensor) -> Tensor:
    """RMSNorm as models write it, in the dtype of x throughout."""
    epsilon = torch.tensor(1e-8, dtype=x.dtype)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)


def _matmul(a: Tensor, b: Tensor, precision: str) -> Tensor:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        return a @ b
    finally:
        torch.set_float32_matmul_precision(before)


def _round_tf32(x: Tensor) -> Tensor:
    """Round float32 to TF32's 11 significant bits (10 stored), to nearest even."""
    bits = x.contiguous().view(torch.int32)
    bits = bits + 0x0FFF + ((bits >> 13) & 1)
    return (bits & ~0x1FFF).view(torch.float32)


def _seed(value: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(value)


def _table(rows: Any) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(list(rows))
