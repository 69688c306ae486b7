"""Traffic, bounds and predictions: performance explained (notebook 4).

traffic/          bytes between slow and fast memory, counted while the algorithms run
roofline          FLOPs and bytes of a case, and the bound that the device's ceilings set
predictor         time and memory of a call from a device's ceilings and a short calibration
work              what a case makes a device do, counted for the predictor
recommend         which backend for a workload, and why
tiles             block sizes: which fit into a fast memory, and what they move
explorer          the same, with controls to play with
nsight            NVIDIA's profilers, and the counters that the lab shows
"""

from labsupport.analysis.explorer import tile_explorer
from labsupport.analysis.predictor import calibrate_run, predict, transfer
from labsupport.analysis.tiles import tile_choices
from labsupport.analysis.traffic import (
    closed_form,
    count,
    fitting_blocks,
    theorem,
    trace_tensors,
)

__all__ = [
    "calibrate_run",
    "closed_form",
    "count",
    "fitting_blocks",
    "predict",
    "theorem",
    "tile_choices",
    "tile_explorer",
    "trace_tensors",
    "transfer",
]
