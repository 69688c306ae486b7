"""FlashAttention inside real models: pretrained weights, Transformers, generation.

sources/      where weights, vocabularies and text come from: a folder, the hub, a package registry
llama2c/      llama2.c's checkpoint and tokenizer files
integration/  labsupport's attention inside Transformers' models, and which of it really ran
generation/   prefill and decode, and how long they take
measure       a whole model's time and memory, by attention and length
flops         the floating-point operations of a whole model
likelihood    how well a model predicts a long text, without all of its logits at once

Names are imported from these files when first used, so that importing the package stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labsupport.models.generation.compare import compare_attention as compare_attention
    from labsupport.models.generation.generate import generate as generate
    from labsupport.models.integration.register import register_attention as register_attention
    from labsupport.models.integration.select import set_attention as set_attention
    from labsupport.models.integration.used import attention_used as attention_used
    from labsupport.models.likelihood import negative_log_likelihood as negative_log_likelihood
    from labsupport.models.measure import measure_model as measure_model
    from labsupport.models.sources.load import load_model as load_model
    from labsupport.models.sources.text import python_topics as python_topics
    from labsupport.models.sources.text import source_text as source_text
    from labsupport.models.sources.text import tokens_of as tokens_of

_HOME = {
    "attention_used": "integration.used",
    "compare_attention": "generation.compare",
    "generate": "generation.generate",
    "load_model": "sources.load",
    "measure_model": "measure",
    "negative_log_likelihood": "likelihood",
    "python_topics": "sources.text",
    "register_attention": "integration.register",
    "set_attention": "integration.select",
    "source_text": "sources.text",
    "tokens_of": "sources.text",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
