"""How fast a case could be: its FLOPs, the bytes that must move, and a device's two ceilings.

A pass (a kernel) with F FLOPs and Y bytes takes at least max(F / peak, Y / bandwidth), if the two
overlap perfectly. Forward and backward are two passes, one after the other.

    pass       FLOPs       bytes that must move, each once
    forward    4 pairs d   Q, K, V in; O, L out
    backward   10 pairs d  Q, K, V, O, dO, L in; dQ, dK, dV out

`pairs` are the visible (query, key) pairs of all heads. Keys that no query sees need not move, and
a group of query heads shares one head of K and V. The bytes are compulsory: a kernel whose tiles
read K and V again and again moves more, unless a cache helps (`labsupport.analysis.traffic`).

Source: Williams et al., "Roofline" (2009); FlashAttention-2 (2023), section 4.1, for the FLOPs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from labsupport.attention.band import Band
from labsupport.profiling.cases import Case
from labsupport.profiling.hardware import Ceilings, HardwareSpec

if TYPE_CHECKING:
    import pandas as pd

ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
NO_WINDOW = (-1, -1)


@dataclass(frozen=True)
class Roof:
    """The two ceilings of a device: TFLOP/s by dtype, and GB/s (10^9) of its large memory.

    kind: "specified" or "measured".
    """

    device: str
    kind: str
    tflops: dict[str, float]
    gb_s: float

    @classmethod
    def of(cls, ceilings: Roof | Ceilings | HardwareSpec) -> Roof:
        """From a row of data/hardware.csv, or from what `measured_ceilings` found."""
        if isinstance(ceilings, Roof):
            return ceilings
        if isinstance(ceilings, HardwareSpec):
            rates = {
                name: ceilings.peak_tflops(name) for name in ("float32", "float16", "bfloat16")
            }
            known = {name: rate for name, rate in rates.items() if rate is not None}
            return cls(ceilings.name, "specified", known, ceilings.bandwidth_gb_s)
        return cls(ceilings.device, "measured", dict(ceilings.matmul_tflops), ceilings.copy_gb_s)

    def peak(self, dtype: str) -> float:
        """TFLOP/s for a dtype.

        Raises:
            ValueError: the device has no figure for it.
        """
        if dtype not in self.tflops:
            known = ", ".join(self.tflops)
            raise ValueError(f"no {self.kind} rate of {self.device} for {dtype}; known: {known}")
        return self.tflops[dtype]

    def ridge(self, dtype: str) -> float:
        """FLOPs a byte from which on arithmetic is the limit."""
        return self.peak(dtype) * 1e3 / self.gb_s


@dataclass(frozen=True)
class Pass:
    """FLOPs and compulsory bytes of one direction."""

    flops: float
    bytes: int


def passes_of(case: Case, window_size: tuple[int, int] = NO_WINDOW) -> list[Pass]:
    """The case's forward, and where it has one its backward.

    Args:
        window_size: (left, right) neighbours that a query sees, -1 for no limit.
    """
    band = Band.of(case.seqlen, case.kv_seqlen, causal=case.causal, window_size=window_size)
    pairs = case.batch * case.heads * band.visible_pairs()
    first, last = band.keys_seen(0, case.seqlen)
    row = case.head_dim * ITEMSIZE[case.dtype]
    of_q = case.batch * case.heads * case.seqlen * row
    of_k = case.batch * case.kv_heads * (last - first) * row
    lse = case.batch * case.heads * case.seqlen * (8 if case.dtype == "float64" else 4)
    # The gradients of keys that nobody sees are zeros, and still have to be written.
    of_dk = case.batch * case.kv_heads * case.kv_seqlen * row
    forward = Pass(4 * pairs * case.head_dim, 2 * of_q + 2 * of_k + lse)
    if case.direction == "forward":
        return [forward]
    backward = Pass(10 * pairs * case.head_dim, 4 * of_q + 2 * of_k + 2 * of_dk + lse)
    return [forward, backward]


def flops_of(case: Case, window_size: tuple[int, int] = NO_WINDOW) -> float:
    """FLOPs of all passes; without a window what `Case.flops` says."""
    return sum(part.flops for part in passes_of(case, window_size))


def bytes_of(case: Case, window_size: tuple[int, int] = NO_WINDOW) -> int:
    """Bytes that must pass between a fused kernel and the large memory: each tensor once."""
    return sum(part.bytes for part in passes_of(case, window_size))


def roofline(
    cases: pd.DataFrame | Iterable[Case],
    ceilings: Roof | Ceilings | HardwareSpec,
    *,
    window_size: tuple[int, int] = NO_WINDOW,
) -> pd.DataFrame:
    """Judge cases, or a table of measurements, against the ceilings of a device.

    Args:
        cases: cases, or a table as `run_grid` and `load_run` return it (with `median_ms`).
        ceilings: specified (`HardwareSpec`), measured (`Ceilings`), or a `Roof` of your own.

    Returns:
        The table with columns added: flops; bytes (compulsory); intensity (FLOPs a byte); bound_ms,
        the least time; bound_by, "arithmetic" or "memory", whichever takes longer in that time;
        of_bound = bound_ms / median_ms, the share of the possible speed (NaN where nothing was
        measured). `.attrs["roof"]` keeps the ceilings.

    Raises:
        ValueError: no rate for a case's dtype.
    """
    import pandas as pd

    roof = Roof.of(ceilings)
    if isinstance(cases, pd.DataFrame):
        table, listed = cases.copy(), [case_of(row) for row in cases.to_dict("records")]
    else:
        listed = list(cases)
        table = pd.DataFrame([asdict(case) for case in listed])
    judged = [_judge(case, roof, window_size) for case in listed]
    added = pd.DataFrame(judged, columns=list(_ADDED), index=table.index)
    table[list(added.columns)] = added
    table["of_bound"] = table["bound_ms"] / table.get("median_ms", math.nan)
    table.attrs = {**getattr(cases, "attrs", {}), "roof": asdict(roof)}
    return table


_ADDED = ("flops", "bytes", "intensity", "bound_ms", "bound_by")


def _judge(case: Case, roof: Roof, window_size: tuple[int, int]) -> tuple[Any, ...]:
    parts = passes_of(case, window_size)
    rate = roof.peak(case.dtype)
    arithmetic = [part.flops / rate / 1e9 for part in parts]  # ms
    memory = [part.bytes / roof.gb_s / 1e6 for part in parts]  # ms
    pairs = list(zip(arithmetic, memory, strict=True))
    limited = sum(a for a, m in pairs if a >= m) >= sum(m for a, m in pairs if m > a)
    flops, moved = sum(part.flops for part in parts), sum(part.bytes for part in parts)
    by = "arithmetic" if limited else "memory"
    return flops, moved, flops / moved, sum(max(pair) for pair in pairs), by


def case_of(row: Mapping[Any, Any]) -> Case:
    """The case of a row of a table of measurements."""
    values: dict[str, Any] = {
        field.name: row[field.name] for field in fields(Case) if field.name in row
    }
    whole = {"seqlen", "kv_seqlen", "batch", "heads", "kv_heads", "head_dim"}
    # A column with gaps is of floats.
    values = {
        name: (0 if value != value else int(value)) if name in whole else value
        for name, value in values.items()
    }
    return Case(**dict[str, Any](values))
