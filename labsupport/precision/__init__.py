"""Choosing a dtype: failures, tools that find them, and their remedies.

dtypes        limits of each dtype, and the range of a tensor
autofix       make three inputs fit one kernel, and report what that costs
tracker       watch a model: dtypes, ranges, casts, the first layer where something goes wrong
findings      judge a tracker's records, and the inputs of one attention call
policy        which component of a model computes in which dtype
layers        normalisation, embedding and output layer with several dtypes
cast_hooks    casts at the boundary of modules, and at attention kernels
losses        cross-entropy in float32, also in chunks
optimizer     float32 master weights, and loss scaling where float16 needs it
experiments/  one small experiment for each rule of the best-practice table
"""

from labsupport.precision.autofix import (
    PrecisionWarning,
    auto_fix_precision_for_flash_attention,
    safe_flash_attention,
)
from labsupport.precision.layers import (
    MixedPrecisionEmbedding,
    MixedPrecisionLayerNorm,
    MixedPrecisionRMSNorm,
)
from labsupport.precision.losses import compute_loss
from labsupport.precision.optimizer import MixedPrecisionOptimizer
from labsupport.precision.policy import FlashAttentionConfig, apply_precision_policy
from labsupport.precision.tracker import PrecisionTracker

__all__ = [
    "FlashAttentionConfig",
    "MixedPrecisionEmbedding",
    "MixedPrecisionLayerNorm",
    "MixedPrecisionOptimizer",
    "MixedPrecisionRMSNorm",
    "PrecisionTracker",
    "PrecisionWarning",
    "apply_precision_policy",
    "auto_fix_precision_for_flash_attention",
    "compute_loss",
    "safe_flash_attention",
]
