"""Make three inputs fit one FlashAttention kernel, and say what was done and what it cost.

safe     the two functions: auto_fix_precision_for_flash_attention, safe_flash_attention
target   which dtype, for which backend, and why
cost     what that dtype costs this call, measured on a sample of its queries
reports  what is said, once per cause
"""

from labsupport.precision.autofix.reports import (
    Cast,
    PrecisionReport,
    PrecisionWarning,
    forget_warnings,
)
from labsupport.precision.autofix.safe import (
    auto_fix_precision_for_flash_attention,
    safe_flash_attention,
)

__all__ = [
    "Cast",
    "PrecisionReport",
    "PrecisionWarning",
    "auto_fix_precision_for_flash_attention",
    "forget_warnings",
    "safe_flash_attention",
]
