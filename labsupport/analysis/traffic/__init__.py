"""FlashAttention's data movement, counted: between a fast memory of M elements and a slow one.

    fast_memory   a fast memory that refuses what does not fit, and counts what passes
    problem       one head, cut into blocks
    standard      textbook attention, kernel by kernel
    flash         the loop orders of FlashAttention's versions, forward and backward
    formulas      closed forms, block sizes that fit, theorem 2
    count         run and count

Any PyTorch program is counted by operator in `labsupport.profiling.memory`.

`python -m benchmarks traffic` prints bytes of the lab's kernels beside a GPU's counters.

What is counted is what theorem 2 bounds: elements between the fast memory of *one* processor and
everything else. On a GPU most of them come from the L2 cache, which the theorem does not know.
"""

from labsupport.analysis.traffic.count import Traffic, count
from labsupport.analysis.traffic.fast_memory import FastMemory, OutOfFastMemoryError, Slow
from labsupport.analysis.traffic.formulas import (
    closed_form,
    elements_needed,
    fitting_blocks,
    theorem,
)
from labsupport.analysis.traffic.problem import Sizes
from labsupport.profiling.memory import TensorTrace, trace_tensors

__all__ = [
    "FastMemory",
    "OutOfFastMemoryError",
    "Sizes",
    "Slow",
    "TensorTrace",
    "Traffic",
    "closed_form",
    "count",
    "elements_needed",
    "fitting_blocks",
    "theorem",
    "trace_tensors",
]
