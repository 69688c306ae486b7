"""What each backend says to each combination of dtypes, and `safe_flash_attention` makes of it.

python -m benchmarks.dtypes                      the table, for this machine
python -m benchmarks.dtypes --save dtypes-cpu    and keep it under data/runs/

"Bare" means that the library is called without this lab's front door, which would refuse mixed
dtypes before the library could.
"""

from __future__ import annotations

import argparse
import itertools
import re
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labsupport.attention.accuracy import relative_error
from labsupport.attention.backends import attention
from labsupport.attention.call import AttentionCall
from labsupport.attention.implementations import BACKENDS
from labsupport.attention.reference import oracle_attention
from labsupport.attention.registry import FLOAT_DTYPES, Backend
from labsupport.precision.autofix import Float64, PrecisionWarning, safe_flash_attention
from labsupport.precision.dtypes import short
from labsupport.profiling.provenance import command_line, provenance
from labsupport.profiling.runs import add_save_options, save_if_asked
from labsupport.profiling.timing import resolve_device

if TYPE_CHECKING:
    import pandas as pd

SHAPE = (1, 128, 2, 64)  # batch, seqlen, heads, head_dim
SAFE = "safe_flash_attention"


def dtype_combinations(
    device: torch.device | str | None = None,
    *,
    dtypes: Sequence[torch.dtype] = FLOAT_DTYPES,
    backends: Sequence[str] | None = None,
) -> pd.DataFrame:
    """Try every combination of dtypes of q, k and v on every backend, and on the safe function.

    Args:
        device: where; a GPU if there is one.
        dtypes: the dtypes to combine.
        backends: names; all that are installed for the device unless given, but `flex`, which
            compiles for seconds at each combination.

    Returns:
        a row for each of `dtypes` cubed times the callers: q, k, v, caller, outcome ("runs",
        "refuses", "NaN"), out (dtype of the result), computed_in (what the safe function cast to),
        error (relative, against the float64 oracle), message (what was raised, or what was said).
        Callers are the backends' names, "sdpa" (PyTorch's own choice among its kernels), "sdpa in
        autocast" (to bfloat16), "attention" (this lab's front door), "safe_flash_attention", and
        the latter with `float64="keep"` and `float64="cast"`.
    """
    import pandas as pd

    where = resolve_device(device)
    callers = _callers(where, backends)
    rows = []
    for combination in itertools.product(dtypes, repeat=3):
        q, k, v = _inputs(combination, where)
        given = [x.transpose(1, 2) for x in (q, k, v)]
        exact = oracle_attention(*(x.double() for x in given))[0].transpose(1, 2)
        for name, call in callers.items():
            row = dict(zip("qkv", map(short, combination), strict=True)) | {"caller": name}
            rows.append(row | _outcome(call, q, k, v, exact))
    table = pd.DataFrame(rows)
    table.attrs["provenance"] = provenance(
        where, command=command_line(), seed=0, shape="x".join(map(str, SHAPE))
    )
    return table


def format_combinations(table: pd.DataFrame) -> str:
    """The table as text: a line a combination, and the messages below, each once."""
    callers = list(dict.fromkeys(table["caller"]))
    notes: dict[str, str] = {}
    lines = [["q", "k", "v", *callers]]
    for (q, k, v), rows in table.groupby(["q", "k", "v"], sort=False):
        cells = []
        for row in rows.set_index("caller").loc[callers].itertuples():
            text = str(row.computed_in or row.out) if row.outcome == "runs" else row.outcome
            said = _without_figures(str(row.message))
            mark = notes.setdefault(said, f"[{len(notes) + 1}]") if said else ""
            cells.append(f"{text} {mark}".strip())
        lines.append([q, k, v, *cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(c.ljust(w) for c, w in zip(ln, widths, strict=True)).rstrip() for ln in lines]
    record = table.attrs.get("provenance", {})
    head = f"{record.get('device', '')}, torch {record.get('versions', {}).get('torch', '')}"
    return "\n".join([head, *text, "", *(f"{mark} {said}" for said, mark in notes.items())])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and save it when asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dtypes",
        description="What each backend does with each combination of dtypes of q, k and v.",
    )
    parser.add_argument("--device", help="cpu or cuda; default: the GPU if there is one")
    parser.add_argument("--backends", help="comma-separated; default: all that run here but flex")
    add_save_options(parser)
    options = parser.parse_args(arguments)
    names = options.backends.split(",") if options.backends else None
    table = dtype_combinations(options.device, backends=names)
    print(format_combinations(table))
    save_if_asked(table, options)


Caller = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, torch.dtype | None]]


def _callers(device: torch.device, names: Sequence[str] | None) -> dict[str, Caller]:
    callers: dict[str, Caller] = {}
    for entry in BACKENDS:
        takes = entry.limits.dtypes.get(device.type, entry.limits.dtypes.get("*"))
        wanted = entry.name in names if names is not None else entry.name != "flex"
        if wanted and takes and entry.missing() is None:
            callers[entry.name] = _bare(entry)
    callers["sdpa"] = _sdpa
    callers["sdpa in autocast"] = _sdpa_in_autocast
    callers["attention"] = _front_door
    callers[SAFE] = _safe("refuse")
    callers['... float64="keep"'] = _safe("keep")
    callers['... float64="cast"'] = _safe("cast")
    return callers


def _bare(entry: Backend) -> Caller:
    return lambda q, k, v: (entry.run(AttentionCall(q, k, v))[0], None)


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2), None


def _sdpa_in_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
    with torch.autocast(q.device.type, dtype=torch.bfloat16):
        return _sdpa(q, k, v)


def _front_door(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
    out = attention(q, k, v)
    assert isinstance(out, Tensor)
    return out, None


def _safe(float64: Float64) -> Caller:
    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, torch.dtype]:
        out, report = safe_flash_attention(q, k, v, float64=float64, return_report=True)
        return out, report.compute_dtype

    return call


def _outcome(call: Caller, q: Tensor, k: Tensor, v: Tensor, exact: Tensor) -> dict[str, Any]:
    row: dict[str, Any] = {
        "outcome": "runs",
        "out": "",
        "computed_in": "",
        "error": float("nan"),
        "message": "",
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrecisionWarning)
            out, computed_in = call(q, k, v)
    except Exception as error:  # whatever a library raises is the result
        first = str(error).strip().split("\n")[0]
        return row | {"outcome": "refuses", "message": f"{type(error).__name__}: {first}"}
    finite = bool(out.isfinite().all())
    return row | {
        "outcome": "runs" if finite else "NaN",
        "out": short(out.dtype),
        "computed_in": "" if computed_in is None else short(computed_in),
        "error": relative_error(out, exact),
    }


def _inputs(dtypes: Sequence[torch.dtype], device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, generator=generator).to(device, dtype) for dtype in dtypes]


def _without_figures(message: str) -> str:
    """One message for all dtypes: which ones were given stands in the line already."""
    message = re.sub(r"\b[qkv]( and [qkv])* (is|are) float64", "an input is float64", message)
    names = r"torch\.b?float(16|32|64)|(c10::)?(double|float|Float|Half|BFloat16|Double)\b"
    message = re.sub(rf"(dtype:? |, |<dtype> |but ){names}", r"\1...", message)
    return re.sub(rf"(\.\.\., )({names})", r"\1...", message)


if __name__ == "__main__":
    main()
