"""The template's `measure.py`, for the `train.py` beside this file."""

import runpy
from pathlib import Path

TEMPLATE = Path(__file__).resolve().parents[1] / "template"
globals().update(runpy.run_path(str(TEMPLATE / "measure.py"), run_name=__name__))
