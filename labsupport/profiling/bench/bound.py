"""How far is a time from the least that this device could need?

The least is what the two measured ceilings leave: the FLOPs of the case at the rate of a large
matrix product, or the bytes that must move at the rate of a large copy, whichever takes longer.
(What an implementation moves beyond that is its own affair: `labsupport.profiling.work`.)
"""

from __future__ import annotations

from dataclasses import dataclass

from labsupport.profiling.cases import Case
from labsupport.profiling.hardware import Ceilings
from labsupport.profiling.work import bytes_of


@dataclass(frozen=True)
class Bound:
    """The least time in ms, and what sets it: "arithmetic" or "memory"."""

    ms: float
    by: str
    tflops: float

    def reached(self, ms: float) -> float:
        """The part of the ceiling that a time of `ms` reaches: 1 is all of it."""
        return self.ms / ms


def bound_of(case: Case, ceilings: Ceilings) -> Bound | None:
    """The least time of a case; None where no ceiling of its dtype was measured (float64)."""
    rate = ceilings.matmul_tflops.get(case.dtype)
    if rate is None:
        return None
    arithmetic = case.flops() / rate / 1e9
    memory = bytes_of(case) / ceilings.copy_gb_s / 1e6
    return Bound(max(arithmetic, memory), "arithmetic" if arithmetic >= memory else "memory", rate)
