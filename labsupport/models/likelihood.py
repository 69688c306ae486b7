"""How well a model predicts a long text, without all of its logits at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from labsupport.precision.losses import compute_loss


@torch.no_grad()
def negative_log_likelihood(model: Any, ids: Tensor, *, chunk: int = 512) -> float:
    """The mean negative log-likelihood of each token but the first, in nats.

    The logits of N tokens are the largest tensor of a small model: with SmolLM2's 49,152 tokens,
    N = 8,192 make 1.6 GB in float32, and the softmax the same again. Here the layers run over the
    whole text, without a cache, and the last one, the classifier, over `chunk` tokens at a time.

    Args:
        model: a Transformers causal language model.
        ids: integers, (batch, N) with N of at least 2, without padding.
        chunk: tokens whose logits exist together. It changes the memory, not the result (beyond
            the rounding of another matmul shape).

    Returns:
        Nats a token; e to this power is the perplexity. The cross-entropy is taken in float32, the
        classifier in the model's dtype, as the model's own loss does.

    Raises:
        ValueError: ids of another shape; a model that does more to its logits than a classifier.
        TypeError: ids that are not integers.
    """
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise TypeError(f"ids must be integers, not {ids.dtype}")
    if ids.ndim != 2 or ids.shape[1] < 2:
        raise ValueError(f"ids {tuple(ids.shape)} must be (batch, N) with N of at least 2")
    head = model.get_output_embeddings()
    for change in ("final_logit_softcapping", "logit_scale", "logits_scaling", "logits_soft_cap"):
        if getattr(model.config, change, None):
            raise ValueError(f"{type(model).__name__} changes its logits afterwards ({change})")
    if head is None:
        raise ValueError(f"{type(model).__name__} has no classifier: it is no language model")
    ids = ids.to(model.device)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return compute_loss(hidden[:, :-1], ids[:, 1:], head=head, chunk_size=chunk).item()
