"""Checks of the exercises, which name the likely mistake.

Each check takes the student's function, calls it on inputs of its own and prints one `[ok]` line,
or raises `CheckFailed` with a diagnosis. `seed` draws other inputs.

    textbook   exercises 1-1 and 1-2
    softmax    exercise 1-3
    flash      exercises 1-4 and 1-5
    dtypes     exercise 1-6
    verdict    how a result is judged, and how a mistake is recognised
    mistakes   what typical wrong solutions compute
"""

from labsupport.checks.dtypes import (
    check_half_attention,
    check_half_dtype_edges,
    check_half_dtype_values,
)
from labsupport.checks.flash import (
    check_backward_edges,
    check_backward_memory,
    check_backward_values,
    check_forward_edges,
    check_forward_lse,
    check_forward_memory,
    check_forward_values,
)
from labsupport.checks.softmax import (
    check_running_extremes,
    check_running_streams,
    check_running_values,
)
from labsupport.checks.textbook import (
    check_largest_length,
    check_score_bytes,
    check_textbook_empty_rows,
    check_textbook_mask,
    check_textbook_values,
)
from labsupport.checks.verdict import CheckFailed
from labsupport.checks.yours import compare_prediction, yours_or_ours

__all__ = [
    "CheckFailed",
    "check_backward_edges",
    "check_backward_memory",
    "check_backward_values",
    "check_forward_edges",
    "check_forward_lse",
    "check_forward_memory",
    "check_forward_values",
    "check_half_attention",
    "check_half_dtype_edges",
    "check_half_dtype_values",
    "check_largest_length",
    "check_running_extremes",
    "check_running_streams",
    "check_running_values",
    "check_score_bytes",
    "check_textbook_empty_rows",
    "check_textbook_mask",
    "check_textbook_values",
    "compare_prediction",
    "yours_or_ours",
]
