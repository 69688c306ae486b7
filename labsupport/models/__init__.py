"""FlashAttention inside real models: pretrained weights, Transformers, generation.

sources/      where weights, vocabularies and text come from: a folder, the hub, a package registry
llama2c       llama2.c's checkpoint and tokenizer files
integration/  labsupport's attention inside Transformers' models, and which of it really ran
generation/   prefill and decode, and how long they take
measure       a whole model's time and memory, by attention and length
flops         the floating-point operations of a whole model
likelihood    how well a model predicts a long text, without storing all of its logits

Names are imported from these files when first used: importing Transformers takes seconds.
"""

from typing import Any

import lazy_loader

__getattr__: Any
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "generation.compare": ["compare_attention"],
        "generation.generate": ["generate"],
        "integration": ["attention_used", "register_attention", "set_attention"],
        "likelihood": ["negative_log_likelihood"],
        "measure": ["measure_model"],
        "sources.load": ["load_model", "load_tokenizer"],
        "sources.text": ["python_topics", "source_text", "tokens_of"],
    },
)
