"""How long, and how much memory: measured.  Each file answers one question.

environment  what is installed, what is missing, which command mends it
card         the short table that opens each notebook
hardware     this device's ceilings, specified and measured
timing       how long a call takes, and how surely
memory       how much extra memory a call needs, and its largest tensor
provenance   where a number comes from
cases        what is measured: a shape, a dtype, a direction, and its FLOPs
benchmark    grids of cases, as a table
runs         tables kept under data/runs/

Names are imported from these files when first used, so that importing the package stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labsupport.profiling.benchmark import readable as readable
    from labsupport.profiling.benchmark import run_grid as run_grid
    from labsupport.profiling.benchmark import speedup as speedup
    from labsupport.profiling.card import environment_card as environment_card
    from labsupport.profiling.cases import Case as Case
    from labsupport.profiling.cases import grid as grid
    from labsupport.profiling.environment import diagnose as diagnose
    from labsupport.profiling.hardware import detect_device as detect_device
    from labsupport.profiling.hardware import hardware_table as hardware_table
    from labsupport.profiling.hardware import measured_ceilings as measured_ceilings
    from labsupport.profiling.memory import LargestTensor as LargestTensor
    from labsupport.profiling.memory import cap_gpu_memory as cap_gpu_memory
    from labsupport.profiling.memory import largest_tensor as largest_tensor
    from labsupport.profiling.memory import measure_peak_memory as measure_peak_memory
    from labsupport.profiling.runs import load_run as load_run
    from labsupport.profiling.runs import save_run as save_run
    from labsupport.profiling.timing import measure_ratio as measure_ratio
    from labsupport.profiling.timing import measure_time as measure_time

_HOME = {
    "Case": "cases",
    "grid": "cases",
    "readable": "benchmark",
    "run_grid": "benchmark",
    "speedup": "benchmark",
    "environment_card": "card",
    "diagnose": "environment",
    "detect_device": "hardware",
    "hardware_table": "hardware",
    "measured_ceilings": "hardware",
    "LargestTensor": "memory",
    "cap_gpu_memory": "memory",
    "largest_tensor": "memory",
    "measure_peak_memory": "memory",
    "load_run": "runs",
    "save_run": "runs",
    "measure_ratio": "timing",
    "measure_time": "timing",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
