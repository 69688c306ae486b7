"""How long, and how much memory: measured.  Each file answers one question.

environment  what is installed, what is missing, which command mends it
card         the short table that opens each notebook
hardware     this device's ceilings, specified and measured
timing       how long a call takes, and how surely (clocks: one reading)
health       would a measurement here be disturbed? read-only
memory       how much extra memory a call needs, and its largest tensor
monitoring/  how much memory a block, or a program, uses over time
bug_report/  everything that a bug report needs, and nothing private
provenance   where a number comes from
cases        what is measured: a case, a grid of cases, their FLOPs
work         what a case must compute and move, at least
presets      shapes of known models, by name
benchmark    grids of cases, measured, as a table
bench/       `labsupport bench`, `sweep` and `compare`
baseline     has a program become slower?
trace/       which kernels and operators take the time
tables       ratios, readable columns, lines to judge by
accuracy     how far outputs are from the oracle
runs         tables kept under data/runs/
graphs       calls recorded as CUDA graphs, so that launches do not count
units        bytes as people read them

Names are imported from these files when first used, so that importing the package stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labsupport.profiling.accuracy import errors_by_dtype as errors_by_dtype
    from labsupport.profiling.benchmark import run_grid as run_grid
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
    from labsupport.profiling.monitoring.sampler import monitor as monitor
    from labsupport.profiling.runs import load_run as load_run
    from labsupport.profiling.runs import save_run as save_run
    from labsupport.profiling.tables import arithmetic_bound_ms as arithmetic_bound_ms
    from labsupport.profiling.tables import readable as readable
    from labsupport.profiling.tables import score_mib as score_mib
    from labsupport.profiling.tables import speedup as speedup
    from labsupport.profiling.timing import measure_ratio as measure_ratio
    from labsupport.profiling.timing import measure_time as measure_time

_HOME = {
    "Case": "cases",
    "LargestTensor": "memory",
    "arithmetic_bound_ms": "tables",
    "cap_gpu_memory": "memory",
    "detect_device": "hardware",
    "diagnose": "environment",
    "environment_card": "card",
    "errors_by_dtype": "accuracy",
    "grid": "cases",
    "hardware_table": "hardware",
    "largest_tensor": "memory",
    "load_run": "runs",
    "measure_peak_memory": "memory",
    "measure_ratio": "timing",
    "measure_time": "timing",
    "measured_ceilings": "hardware",
    "monitor": "monitoring.sampler",
    "readable": "tables",
    "run_grid": "benchmark",
    "save_run": "runs",
    "score_mib": "tables",
    "speedup": "tables",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
