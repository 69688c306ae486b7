"""labsupport's attention inside Transformers' models, and a record of what really ran.

mask_description  the model's mask as a description instead of N_q x N_k booleans, or a refusal
functions         the function that an attention layer calls, one for each backend
select            set_attention and register_attention: the choice, checked before the first forward
trace             attention_used: what ran in which layer, and the log
"""

import labsupport.attention as _attention  # noqa: F401  before Transformers: both import Triton
from labsupport.models.integration.functions import backend_function, layer_function
from labsupport.models.integration.mask_description import AttentionRefusedError
from labsupport.models.integration.select import (
    chosen_attention,
    register_attention,
    register_backends,
    set_attention,
)
from labsupport.models.integration.trace import attention_used, reset_attention_used

__all__ = [
    "AttentionRefusedError",
    "attention_used",
    "backend_function",
    "chosen_attention",
    "layer_function",
    "register_attention",
    "reset_attention_used",
    "set_attention",
]

# A model that `torch.save` saved whole finds its attention's name again.
register_backends()
