"""The likelihood of a long text under a model, without storing all of its logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from labsupport.models.generation.prompts import Batch, check_model, check_room
from labsupport.precision.losses import compute_loss


@torch.no_grad()
def negative_log_likelihood(model: Any, ids: Tensor, *, chunk: int = 512) -> float:
    """Return the mean negative log-likelihood of each token but the first, in nats.

    The logits of N tokens are the largest tensor of a small model: with SmolLM2's 49,152 tokens,
    N = 8,192 make 1.6 GB in float32, and the softmax the same again. Here the layers run over the
    whole text, without a cache, and the last one, the classifier, over `chunk` tokens at a time.

    Args:
        model: a Transformers causal language model in eval mode, whose logits are its classifier's
            output for its last hidden states, as of GPT-2 and Llama.
        ids: integers, (batch, N) with N of at least 2, without padding.
        chunk: tokens whose logits exist together. It changes the memory, not the result (beyond
            the rounding of another matmul shape).

    Returns:
        Nats a token; e to this power is the perplexity. The cross-entropy is taken in float32, the
        classifier in the model's dtype, as the model's own loss does.

    Raises:
        ValueError: ids of another shape, more than the model has positions, or outside of its
            vocabulary; a model in training mode with dropout.

    >>> story = load_model("stories15m", device="cpu")
    >>> ids = story.tokenizer("Once upon a time, there was a girl.", return_tensors="pt").input_ids
    >>> negative_log_likelihood(story.model, ids) < 3  # nats a token
    True
    """
    check_model(model)
    if ids.ndim != 2 or ids.shape[1] < 2:
        raise ValueError(f"ids {tuple(ids.shape)} must be (batch, N), with N of at least 2")
    ids = ids.to(model.device)
    check_room(model, Batch(ids, (ids.shape[1],) * len(ids)), 0)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    head = model.get_output_embeddings()
    return compute_loss(hidden[:, :-1], ids[:, 1:], head=head, chunk_size=chunk).item()
