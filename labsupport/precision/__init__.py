"""In which dtype: what goes wrong, how it is found, how it is mended.

    dtypes      what each dtype can hold, and what a tensor holds
    autofix     make three inputs fit one kernel, and say what that costs
    tracker     watch a model: dtypes, ranges, casts, the first layer where things went wrong
    policy      which component of a model computes in which dtype
    layers      normalisation and embedding with the dtypes apart
    losses      cross-entropy in float32, also in chunks
    optimizer   float32 master weights, and loss scaling where float16 needs it
    evidence    one small experiment per rule of the best-practice table
    combinations  what each backend says to each combination of dtypes

Names are imported when they are first used.
"""

import importlib
from typing import Any

_HOME = {
    "PrecisionTracker": "tracker",
    "PrecisionReport": "reports",
    "PrecisionWarning": "reports",
    "auto_fix_precision_for_flash_attention": "autofix",
    "safe_flash_attention": "autofix",
    "FlashAttentionConfig": "policy",
    "apply_precision_policy": "policy",
    "MixedPrecisionLayerNorm": "layers",
    "MixedPrecisionRMSNorm": "layers",
    "MixedPrecisionEmbedding": "layers",
    "compute_loss": "losses",
    "MixedPrecisionOptimizer": "optimizer",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    """Import a name when it is first used (PEP 562)."""
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"labsupport.precision has no {name!r}; it has {', '.join(_HOME)}")


def __dir__() -> list[str]:
    """Name what is not imported yet, too, so that completion finds it."""
    return sorted(__all__)
