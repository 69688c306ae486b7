"""labsupport's attention inside Transformers' models, and which of it really ran.

masks      what the mask function returns: a description instead of N_q x N_k booleans
kinds      which masks are known, and which are refused
functions  what an attention layer calls: one function a backend
register   the names under which Transformers finds them, and a student's own function
select     set_attention: the choice, checked before the first forward
used       attention_used: what ran in which layer, and the log
"""

import labsupport.attention as _attention  # noqa: F401  before Transformers: both import Triton
from labsupport.models.integration.register import register_backends

# A model that was saved whole by `torch.save` finds its attention's name again.
register_backends()
