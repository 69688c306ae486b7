"""A text that a model has read: its keys and values, kept for any number of continuations.

The layers run over a long text once. Each question behind it then costs its own tokens only: the
cache grows by them, and is cut back afterwards. Logits exist for a few positions at a time; those
of a long text would be larger than the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Reading:
    """The keys and values of a text.

    Args:
        model: a Transformers causal language model in eval mode, without sliding windows (their
            cache forgets what a continuation would have to give back).
        ids: (1, N) int64, the text; N of at least 1.

    Attributes:
        length: how many tokens were read.
        last: (vocabulary,) the logits behind the last of them.

    Raises:
        ValueError: ids of another shape; a model in training mode.
    """

    def __init__(self, model: Any, ids: Tensor) -> None:
        from transformers import DynamicCache

        if ids.ndim != 2 or ids.shape[0] != 1 or not ids.shape[1]:
            raise ValueError(f"ids {tuple(ids.shape)} must be (1, N) with N of at least 1")
        if model.training:
            raise ValueError("the model is in training mode: model.eval()")
        self.model, self.length = model, 0
        self.cache = DynamicCache(config=model.config)
        self.last = self.extend(ids, keep=1)[-1]

    def extend(self, ids: Tensor, *, keep: int) -> Tensor:
        """Read on, (1, n) more tokens: the logits behind the last `keep`, (keep, vocabulary).

        keep: 1 to n.
        """
        logits = self._forward(ids, logits_to_keep=keep).logits[0]
        self.length += ids.shape[1]
        self.last = logits[-1]
        return logits

    def ask(self, ids: Tensor, *, keep: int = 1, without: tuple[int, int] | None = None) -> Tensor:
        """The logits behind the last `keep` tokens of a continuation, which is then forgotten.

        Args:
            ids: (1, n) int64.
            keep: 1 to n.
            without: tokens [start, end) of the text that the continuation may not look at. Later
                tokens of the text have seen them and still hold what they took from them.

        Returns:
            (keep, vocabulary).
        """
        options: dict[str, Any] = {"logits_to_keep": keep}
        if without is not None:
            mask = torch.ones(1, self.length + ids.shape[1], dtype=torch.long)
            mask[:, slice(*without)] = 0
            options["attention_mask"] = mask.to(self.model.device)
        try:
            return self._forward(ids, **options).logits[0]
        finally:
            self._forget()

    def attention(self, ids: Tensor) -> Tensor:
        """Where the last token of a continuation looks: weights (layers, heads, length), float32.

        FlashAttention never has a row of P as a whole, so this one token runs through Transformers'
        "eager" attention; its row is as long as the text, and no square.
        """
        chosen = self.model.config._attn_implementation
        try:
            if ids.shape[1] > 1:
                self._forward(ids[:, :-1], logits_to_keep=1)
            self.model.set_attn_implementation("eager")
            out = self._forward(ids[:, -1:], logits_to_keep=1, output_attentions=True)
        finally:
            self.model.set_attn_implementation(chosen)
            self._forget()
        rows = torch.stack([weights[0, :, 0, : self.length] for weights in out.attentions])
        return rows.float()

    @torch.no_grad()
    def _forward(self, ids: Tensor, **options: Any) -> Any:
        ids = ids.to(self.model.device)
        start = self.cache.get_seq_length()
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        return self.model(
            ids, position_ids=positions, past_key_values=self.cache, use_cache=True, **options
        )

    def _forget(self) -> None:
        extra = self.cache.get_seq_length() - self.length
        if extra:
            self.cache.crop(-extra)  # newer versions of Transformers take this form only
