"""Every combination of dtypes of q, k and v, on each backend and on `safe_flash_attention`.

    python -m benchmarks dtypes                      the table, for this machine
    python -m benchmarks dtypes --save dtypes-cpu    save it, too

The libraries are called without this lab's `attention`, which would refuse mixed dtypes first.
"""

import argparse
import itertools
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.runner import Trial, names, run
from labsupport.attention.accuracy import relative_error
from labsupport.attention.backends import attention
from labsupport.attention.call import AttentionCall
from labsupport.attention.implementations import BACKENDS, FLOAT_DTYPES, Backend
from labsupport.attention.reference import oracle_attention
from labsupport.precision.autofix import Float64, PrecisionWarning, safe_flash_attention
from labsupport.precision.dtypes import short
from labsupport.profiling.timing import resolve_device

SHAPE = (1, 128, 2, 64)  # batch, seqlen, heads, head_dim
SAFE, KEEP, CAST = "safe_flash_attention", '... float64="keep"', '... float64="cast"'


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backends", type=names, help="default: all that run here but flex")


def measure(options: argparse.Namespace) -> pd.DataFrame:
    """Try every combination of dtypes of q, k and v on every backend, and on the safe function.

    `flex` is left out unless it is named: it compiles for seconds at each combination.

    Returns:
        A row for each combination and caller: q, k, v, caller, outcome ("runs", "refuses", "NaN"),
        out (dtype of the result), computed_in (what the safe function cast to), error (relative,
        against the float64 oracle), message (what was raised).
    """
    device = resolve_device(options.device)
    callers = _callers(device, options.backends)
    cases = [Trial({"q": short(q)}, partial(_outcomes, callers, q, device)) for q in FLOAT_DTYPES]
    return run(cases, device, seed=0, shape="x".join(map(str, SHAPE)))


def show(table: pd.DataFrame, options: argparse.Namespace) -> str:
    """Return a line for each combination, and below a message of each caller that refuses."""
    ran = table.computed_in.where(table.computed_in != "", table.out)
    cells = table.assign(does=ran.where(table.outcome == "runs", table.outcome))
    wide = cells.pivot(index=["q", "k", "v"], columns="caller", values="does")
    refused = table[table.message != ""].groupby("caller", sort=False).message.first()
    said = [f"{caller}: {message}" for caller, message in refused.items()]
    record = table.attrs["provenance"]
    head = f"{record['device']}, torch {record['versions']['torch']}"
    return "\n".join([head, wide[table.caller.unique()].to_string(), "", *said])


Caller = Callable[[Tensor, Tensor, Tensor], tuple[Any, torch.dtype | None]]


def _callers(device: torch.device, chosen: Sequence[str] | None) -> dict[str, Caller]:
    callers: dict[str, Caller] = {}
    for entry in BACKENDS:
        takes = entry.limits.dtypes.get(device.type, entry.limits.dtypes.get("*"))
        wanted = entry.name in chosen if chosen is not None else entry.name != "flex"
        if wanted and takes and entry.missing() is None:
            callers[entry.name] = partial(_bare, entry)
    ways: dict[str, Float64] = {SAFE: "refuse", KEEP: "keep", CAST: "cast"}
    return callers | {
        "sdpa": _sdpa,
        "sdpa in autocast": torch.autocast(device.type, dtype=torch.bfloat16)(_sdpa),
        "attention": lambda q, k, v: (attention(q, k, v), None),
        **{name: partial(_safe, float64) for name, float64 in ways.items()},
    }


def _bare(entry: Backend, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
    call = AttentionCall(q, k, v)
    return entry.kernel(call).run(call)[0], None


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2), None


def _safe(float64: Float64, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, torch.dtype]:
    out, report = safe_flash_attention(q, k, v, float64=float64, return_report=True)
    return out, report.compute_dtype


def _outcomes(
    callers: dict[str, Caller], q_dtype: torch.dtype, device: torch.device
) -> list[dict[str, Any]]:
    rows = []
    for k_dtype, v_dtype in itertools.product(FLOAT_DTYPES, repeat=2):
        generator = torch.Generator().manual_seed(0)
        dtypes = q_dtype, k_dtype, v_dtype
        q, k, v = (torch.randn(SHAPE, generator=generator).to(device, dtype) for dtype in dtypes)
        exact = oracle_attention(*(x.double().transpose(1, 2) for x in (q, k, v)))[0]
        for name, call in callers.items():
            row = {"k": short(k_dtype), "v": short(v_dtype), "caller": name}
            rows.append(row | _outcome(call, q, k, v, exact.transpose(1, 2)))
    return rows


def _outcome(call: Caller, q: Tensor, k: Tensor, v: Tensor, exact: Tensor) -> dict[str, Any]:
    row: dict[str, Any] = {"out": "", "computed_in": "", "error": float("nan"), "message": ""}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrecisionWarning)
            out, computed_in = call(q, k, v)
    except Exception as error:  # whatever a library raises is the result
        first = str(error).strip().split("\n")[0]
        return row | {"outcome": "refuses", "message": f"{type(error).__name__}: {first}"}
    return row | {
        "outcome": "runs" if out.isfinite().all() else "NaN",
        "out": short(out.dtype),
        "computed_in": "" if computed_in is None else short(computed_in),
        "error": relative_error(out, exact),
    }
