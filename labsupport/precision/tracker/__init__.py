"""Watch a model: dtypes, ranges, casts, and the first layer where things went wrong.

tracker     PrecisionTracker
hooks       how the calls are seen
records     what is written down of one call
findings    what the records say; gradients: of the backward pass
violations  what is wrong with the q, k and v of one attention call
"""

from labsupport.precision.tracker.tracker import PrecisionTracker
from labsupport.precision.tracker.violations import Violation

__all__ = ["PrecisionTracker", "Violation"]
