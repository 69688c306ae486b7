"""How much memory will a training step need, and which part of it is the most?

shape    what the formulas are about: T, N, L, w, ... and the bytes of each dtype
kept     what a block keeps for its backward pass
moments  what exists at the same time, at each moment that may be the peak
devices  what a CPU and a GPU do differently
plan     plan_memory: the moments put together, and which of them is the peak
fits     longest, what_fits: from a limit back to lengths
measure  a real step, measured, beside its plan: python -m benchmarks planner

Names are imported from these files when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labsupport.training.planner.fits import LADDER as LADDER
    from labsupport.training.planner.fits import Rung as Rung
    from labsupport.training.planner.fits import longest as longest
    from labsupport.training.planner.fits import what_fits as what_fits
    from labsupport.training.planner.measure import compare as compare
    from labsupport.training.planner.measure import measure_step as measure_step
    from labsupport.training.planner.plan import MemoryPlan as MemoryPlan
    from labsupport.training.planner.plan import plan_memory as plan_memory
    from labsupport.training.planner.shape import Part as Part

_HOME = {
    "LADDER": "fits",
    "MemoryPlan": "plan",
    "Part": "shape",
    "Rung": "fits",
    "compare": "measure",
    "longest": "fits",
    "measure_step": "measure",
    "plan_memory": "plan",
    "what_fits": "fits",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
