"""Textbook attention, FlashAttention, and one function over every implementation.

`backends.attention` chooses from the table of `implementations` and calls one of the `adapters`.
The mathematics (`standard_attention`, `flash_attention_forward`, ...) takes
(..., seqlen, head_dim); what faces a model (`attention`, `flash_attention`, `attention_varlen`)
takes flash-attn's layout.
"""

from typing import Any

from labsupport.attention.kernels import mode

mode.settle()  # before anything below imports Triton

from labsupport.attention.accuracy import ErrorReport, compare_with_oracle
from labsupport.attention.backends import (
    attention,
    attention_varlen,
    available_backends,
    flash_attention,
    last_call,
    register_backend,
)
from labsupport.attention.call import BackendUnavailableError
from labsupport.attention.drop_in import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from labsupport.attention.flash_torch import FlashAttentionFunction, flash_attention_forward
from labsupport.attention.fp8 import fp8_attention
from labsupport.attention.inputs import AttentionInputError
from labsupport.attention.kernels.autograd import TritonFlashAttentionFunction
from labsupport.attention.online_softmax import merge_attention, online_softmax
from labsupport.attention.reference import oracle_attention, standard_attention
from labsupport.attention.rotary import apply_rotary_emb, rotary_angles

__all__ = [
    "AttentionInputError",
    "BackendUnavailableError",
    "ErrorReport",
    "FlashAttentionFunction",
    "TritonFlashAttentionFunction",
    "apply_rotary_emb",
    "attention",
    "attention_varlen",
    "available_backends",
    "compare_with_oracle",
    "flash_attention",
    "flash_attention_forward",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "fp8_attention",
    "last_call",
    "merge_attention",
    "online_softmax",
    "oracle_attention",
    "register_backend",
    "rotary_angles",
    "standard_attention",
]

# Names that are looked for here, and where they are or what to use.
_INSTEAD = dict.fromkeys(
    ("set_attention", "register_attention", "attention_used"), "import it from labsupport.models"
) | dict.fromkeys(
    ("unpad_input", "pad_input"), "docs/coming-from.md has three lines of PyTorch for it"
)


def __getattr__(name: str) -> Any:
    if name in _INSTEAD:
        raise ImportError(f"labsupport.attention has no {name}: {_INSTEAD[name]}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
