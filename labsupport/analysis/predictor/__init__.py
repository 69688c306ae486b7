"""Time and memory of a call, predicted from a device's ceilings.

split        shapes that calibrate, and shapes that are tested
work         what a case makes a device do, counted
device       the ceilings of a device, recorded or specified
calibration  the weights of the counts, fitted
memory       peak memory by formula
predict      time, memory, an interval, and the reasons
evaluate     errors on the shapes that were held out

`python -m benchmarks predictor --save NAME` records a run to calibrate on.
"""

from labsupport.analysis.predictor.calibration import Model, calibrate, calibrate_run
from labsupport.analysis.predictor.device import Device, device_from_specification, device_of_run
from labsupport.analysis.predictor.predict import OutOfRangeError, Prediction, predict, transfer

__all__ = [
    "Device",
    "Model",
    "OutOfRangeError",
    "Prediction",
    "calibrate",
    "calibrate_run",
    "device_from_specification",
    "device_of_run",
    "predict",
    "transfer",
]
