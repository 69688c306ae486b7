"""The floating-point operations of a whole model, counted by rule.

A multiply-add counts as 2. Linear layers take 2 FLOPs a weight and token; causal attention takes
2 N^2 d a head and layer, for Q K^T and P V together, the visible half. Embeddings, norms and
activations are left out. A backward pass takes twice the linear layers' FLOPs and 2.5 times
attention's, with S recomputed (theory chapter 9; FlashAttention-2 paper, section 4.1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def head_dim_of(config: Any) -> int:
    """Return the width of a head, as the config says it or as hidden_size / heads."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def model_flops(
    model: PreTrainedModel,
    batch: int,
    seqlen: int,
    *,
    backward: bool = False,
    logits: int | None = None,
) -> int:
    """Return the FLOPs of one pass of a causal language model over (batch, seqlen) tokens.

    Args:
        backward: count the backward pass, too.
        logits: for how many positions a row they are computed; None: for all.

    Raises:
        ValueError: a number below 0, or more logits than positions.
    """
    if min(batch, seqlen) < 0 or not 0 <= (logits or 0) <= seqlen:
        raise ValueError(
            f"batch {batch}, seqlen {seqlen}, logits {logits}: at least 0, and no more logits than "
            "positions"
        )
    config: Any = model.config
    # GPT-2's linear layers are `Conv1D` in Transformers.
    modules: Any = model.get_decoder().modules()
    linear = sum(
        module.weight.numel()
        for module in modules
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    )
    head = config.hidden_size * config.vocab_size
    width = config.num_attention_heads * head_dim_of(config)
    products = 2 * batch * (linear * seqlen + head * (seqlen if logits is None else logits))
    attention = 2 * batch * config.num_hidden_layers * seqlen**2 * width
    if backward:
        return 3 * products + round(3.5 * attention)
    return products + attention
