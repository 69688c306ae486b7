"""Memory of a training step: what exists at each phase, and which sequence fits a limit.

formulas  the parts of memory at each phase, as formulas that are evaluated as they are printed
plan      plan_memory, longest, what_fits; and a real step, measured beside its plan
"""

from labsupport.training.planner.plan import (
    STRATEGIES,
    MemoryStrategy,
    longest,
    measure_step,
    plan_memory,
    what_fits,
)

__all__ = [
    "STRATEGIES",
    "MemoryStrategy",
    "longest",
    "measure_step",
    "plan_memory",
    "what_fits",
]
