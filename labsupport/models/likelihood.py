"""The likelihood of a long text under a model, without all of its logits at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from labsupport.models.generation.prompts import Batch, check_room
from labsupport.precision.losses import compute_loss


@torch.no_grad()
def negative_log_likelihood(model: Any, ids: Tensor, *, chunk: int = 512) -> float:
    """Return the mean negative log-likelihood of each token but the first, in nats.

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
        ValueError: ids of another shape or dtype, more of them than the model has positions, or
            outside of its vocabulary; a model whose logits are not its classifier's output for its
            last hidden states; a model in training mode that has dropout.

    >>> story = load_model("stories15m", device="cpu")
    >>> ids = story.tokenizer("Once upon a time, there was a girl.", return_tensors="pt").input_ids
    >>> negative_log_likelihood(story.model, ids) < 3  # nats a token
    True
    """
    if ids.ndim != 2 or ids.shape[1] < 2 or ids.is_floating_point():
        raise ValueError(
            f"ids {tuple(ids.shape)} of {ids.dtype} must be integers (batch, N), N at least 2"
        )
    # Attention's own dropout is a number in the configuration.
    rates = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    rates.append(getattr(model.config.get_text_config(), "attention_dropout", 0.0))
    if model.training and any(rates):
        raise ValueError("the model is in training mode, and its dropout is active: model.eval()")
    ids = ids.to(model.device)
    check_room(model, Batch(ids, (ids.shape[1],) * len(ids)), 0)
    hidden, head = _last_hidden(model, ids)
    return compute_loss(hidden[:, :-1], ids[:, 1:], head=head, chunk_size=chunk).item()


def _last_hidden(model: Any, ids: Tensor) -> tuple[Tensor, nn.Module]:
    """Return the last hidden states, (batch, N, width), and what makes logits of them.

    The model runs once, for the logits of one position: they must be the classifier's output for
    the last hidden state. (Some models transform, scale or cap before or afterwards.)
    """
    name, head = type(model).__name__, model.get_output_embeddings()
    if head is None or model.config.is_encoder_decoder:
        raise ValueError(f"{name} is no causal language model, or has no classifier")
    hidden: list[Tensor] = []
    hook = model.base_model.register_forward_hook(
        lambda module, args, out: hidden.append(out.last_hidden_state)
    )
    try:
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
    finally:
        hook.remove()
    own = head(hidden[0][:, -1:])
    if not torch.allclose(own.float(), logits.float(), rtol=0.0, atol=0.0, equal_nan=True):
        raise ValueError(
            f"{name} does more than one matrix product between its last hidden states and its "
            "logits: take its own loss, model(ids, labels=ids).loss"
        )
    return hidden[0], head
