"""The least time of a case: its FLOPs, the bytes that must move, and a device's two ceilings.

A pass (a kernel) with F FLOPs and Y bytes takes at least max(F / peak, Y / bandwidth), if the two
overlap perfectly. Forward and backward are two passes, one after the other.

What a pass computes and must move is counted in `labsupport.profiling.grids`.

Source: Williams et al., "Roofline" (2009).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from labsupport.profiling.grids import NO_WINDOW, Case, case_of, passes_of
from labsupport.profiling.hardware import Ceilings, HardwareSpec

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Roof:
    """The two ceilings of a device: TFLOP/s by dtype, and GB/s (10^9) of its large memory.

    kind: "specified" or "measured".

    Raises:
        ValueError: a rate that is not above 0.
    """

    device: str
    kind: str
    tflops: dict[str, float]
    gb_s: float

    def __post_init__(self) -> None:
        if not all(rate > 0 for rate in (self.gb_s, *self.tflops.values())):
            raise ValueError(f"rates are above 0, but {self.tflops} and {self.gb_s} GB/s are given")

    @classmethod
    def of(cls, ceilings: Roof | Ceilings | HardwareSpec) -> Roof:
        """Build it from a row of data/hardware.csv, or from what `measured_ceilings` found."""
        if isinstance(ceilings, Roof):
            return ceilings
        if isinstance(ceilings, HardwareSpec):
            rates = {n: ceilings.peak_tflops(n) for n in ("float32", "float16", "bfloat16")}
            known = {name: rate for name, rate in rates.items() if rate is not None}
            return cls(ceilings.name, "specified", known, ceilings.bandwidth_gb_s)
        return cls(ceilings.device, "measured", dict(ceilings.matmul_tflops), ceilings.copy_gb_s)

    def peak(self, dtype: str) -> float:
        """TFLOP/s for a dtype; raise ValueError if the device has no figure for it."""
        if dtype not in self.tflops:
            known = ", ".join(self.tflops)
            raise ValueError(f"no {self.kind} rate of {self.device} for {dtype}; known: {known}")
        return self.tflops[dtype]

    def ridge(self, dtype: str) -> float:
        """FLOPs a byte from which on arithmetic is the limit."""
        return self.peak(dtype) * 1e3 / self.gb_s


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
    columns = ["flops", "bytes", "intensity", "bound_ms", "bound_by"]
    judged = []
    for case in listed:
        parts, rate = passes_of(case, window_size), roof.peak(case.dtype)
        times = [(part.flops / rate / 1e9, part.bytes / roof.gb_s / 1e6) for part in parts]  # ms
        limited = sum(a for a, m in times if a >= m) >= sum(m for a, m in times if m > a)
        flops, moved = sum(part.flops for part in parts), sum(part.bytes for part in parts)
        by = "arithmetic" if limited else "memory"
        judged.append((flops, moved, flops / moved, sum(map(max, times)), by))
    table[columns] = pd.DataFrame(judged, columns=columns, index=table.index)
    table["of_bound"] = table["bound_ms"] / table.get("median_ms", math.nan)
    table.attrs = {**getattr(cases, "attrs", {}), "roof": asdict(roof)}
    return table
