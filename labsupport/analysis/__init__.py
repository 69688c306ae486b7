"""Why, and how far it could go: explained and predicted (notebook 4).

traffic/          bytes between slow and fast memory, counted while the algorithms run
roofline          FLOPs and bytes of a case, and the bound that the device's ceilings set
predictor/        time and memory of a call from a device's ceilings and a short calibration
recommend         which backend for a workload, and why
tiles             block sizes: which fit into a fast memory, and what they move
loop_orders       bytes that the loop orders of versions 1 and 2 move
explorer          the same, with controls to play with
profile/          `labsupport profile`: a folder that begins with SUMMARY.md

Names are imported from these files when first used, so that importing the package stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labsupport.analysis.explorer import tile_choices as tile_choices
    from labsupport.analysis.explorer import tile_explorer as tile_explorer
    from labsupport.analysis.predictor.calibration import calibrate_run as calibrate_run
    from labsupport.analysis.predictor.predict import predict as predict
    from labsupport.analysis.predictor.predict import transfer as transfer
    from labsupport.analysis.traffic.count import count as count
    from labsupport.analysis.traffic.count import exponent as exponent
    from labsupport.analysis.traffic.count import traffic_table as traffic_table
    from labsupport.analysis.traffic.formulas import closed_form as closed_form
    from labsupport.analysis.traffic.formulas import fitting_blocks as fitting_blocks
    from labsupport.analysis.traffic.formulas import theorem as theorem
    from labsupport.analysis.traffic.memory import FastMemory as FastMemory
    from labsupport.analysis.traffic.tensors import trace_tensors as trace_tensors

_HOME = {
    "FastMemory": "traffic.memory",
    "calibrate_run": "predictor.calibration",
    "closed_form": "traffic.formulas",
    "count": "traffic.count",
    "exponent": "traffic.count",
    "fitting_blocks": "traffic.formulas",
    "predict": "predictor.predict",
    "theorem": "traffic.formulas",
    "tile_choices": "explorer",
    "tile_explorer": "explorer",
    "trace_tensors": "traffic.tensors",
    "traffic_table": "traffic.count",
    "transfer": "predictor.predict",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
