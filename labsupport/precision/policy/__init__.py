"""Which component of a model computes in which dtype: a policy, applied once, reported in full.

config      FlashAttentionConfig: a dtype for each component
policy      apply_precision_policy: put a model under a policy
components  how components are recognised in a model
boundaries  how casts are made, at modules and at attention kernels
layers      normalisation, embedding and output layer with their dtypes apart
report      what was changed
"""

from labsupport.precision.policy.config import FlashAttentionConfig
from labsupport.precision.policy.policy import apply_precision_policy
from labsupport.precision.policy.report import PolicyChange, PolicyReport

__all__ = ["FlashAttentionConfig", "PolicyChange", "PolicyReport", "apply_precision_policy"]
