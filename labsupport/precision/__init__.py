"""In which dtype: what goes wrong, how it is found, how it is mended.

    dtypes        what each dtype can hold, and what a tensor holds
    autofix/      make three inputs fit one kernel, and say what that costs
    tracker/      watch a model: dtypes, ranges, casts, the first layer where things went wrong
    policy/       which component of a model computes in which dtype, and the layers for it
    losses        cross-entropy in float32, also in chunks
    optimizer     float32 master weights, and loss scaling where float16 needs it
    evidence/     one small experiment for each rule of the best-practice table

Names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labsupport.precision.autofix import PrecisionReport as PrecisionReport
    from labsupport.precision.autofix import PrecisionWarning as PrecisionWarning
    from labsupport.precision.autofix import (
        auto_fix_precision_for_flash_attention as auto_fix_precision_for_flash_attention,
    )
    from labsupport.precision.autofix import safe_flash_attention as safe_flash_attention
    from labsupport.precision.losses import compute_loss as compute_loss
    from labsupport.precision.optimizer import MixedPrecisionOptimizer as MixedPrecisionOptimizer
    from labsupport.precision.policy import FlashAttentionConfig as FlashAttentionConfig
    from labsupport.precision.policy import apply_precision_policy as apply_precision_policy
    from labsupport.precision.policy.layers import (
        MixedPrecisionEmbedding as MixedPrecisionEmbedding,
    )
    from labsupport.precision.policy.layers import (
        MixedPrecisionLayerNorm as MixedPrecisionLayerNorm,
    )
    from labsupport.precision.policy.layers import MixedPrecisionRMSNorm as MixedPrecisionRMSNorm
    from labsupport.precision.tracker import PrecisionTracker as PrecisionTracker

_HOME = {
    "FlashAttentionConfig": "policy",
    "MixedPrecisionEmbedding": "policy.layers",
    "MixedPrecisionLayerNorm": "policy.layers",
    "MixedPrecisionOptimizer": "optimizer",
    "MixedPrecisionRMSNorm": "policy.layers",
    "PrecisionReport": "autofix",
    "PrecisionTracker": "tracker",
    "PrecisionWarning": "autofix",
    "apply_precision_policy": "policy",
    "auto_fix_precision_for_flash_attention": "autofix",
    "compute_loss": "losses",
    "safe_flash_attention": "autofix",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import a name when it is first used (PEP 562)."""
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Name what is not imported yet, too, so that completion finds it."""
    return __all__
