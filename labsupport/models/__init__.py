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

import importlib
from typing import Any

_HOME = {
    "attention_used": "integration",
    "compare_attention": "generation.compare",
    "generate": "generation.generate",
    "load_model": "sources.load",
    "load_tokenizer": "sources.load",
    "measure_model": "measure",
    "negative_log_likelihood": "likelihood",
    "python_topics": "sources.text",
    "register_attention": "integration",
    "set_attention": "integration",
    "source_text": "sources.text",
    "tokens_of": "sources.text",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
