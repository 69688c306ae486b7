"""Time, memory and devices, measured. Each file is one subject.

environment, health   what is installed and missing; would a measurement here be disturbed?
card                  the short table that opens each notebook
hardware, gpu         ceilings, specified and measured; a GPU's state as its driver reports it
timing                how long a call takes, and how surely; calls recorded as CUDA graphs
memory                extra memory of a call, exactly; the bytes that its operators move
trace                 which kernels and operators take the time
grids, tables         cases, their FLOPs and bytes; a grid of them measured; readable columns
shapes                the presets, and the case that a command's options name
provenance, runs      where a number comes from; tables kept under data/runs/
units                 bytes as people read them

Names are imported when first used, so that the preflight needs no PyTorch.
"""

from typing import Any

import lazy_loader

__getattr__: Any
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "card": ["environment_card"],
        "grids": ["Case", "errors_by_dtype", "grid", "run_grid"],
        "hardware": ["hardware_table", "measured_ceilings"],
        "memory": ["largest_tensor", "measure_peak_memory"],
        "runs": ["load_run", "save_run"],
        "tables": ["arithmetic_bound_ms", "readable", "score_mib", "speedup"],
        "timing": ["measure_ratio", "measure_time"],
    },
)
