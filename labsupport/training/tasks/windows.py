"""The gain in predicting a passage when a model sees more of the text before it.

    ... text ... [ first time ] ... text ... ... ... [ the passage ]
                                     |<--- window -->|<-- target -->|

In plain text most of what helps stands near, so the gain is small. Where something returns after a
long distance (a function, a licence, a quotation), the gain comes in one jump: when the window
reaches the first occurrence, the model copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labsupport.models import tokens_of

if TYPE_CHECKING:
    import pandas as pd

CHUNK = 128  # tokens whose logits exist together


class Reading:
    """A text that a model has read: its keys and values, for any number of continuations.

    Each question after it costs its own tokens only: the cache is cut back afterwards.

    Args:
        model: a Transformers causal language model in eval mode, without sliding windows (their
            cache forgets what a continuation would have to give back).
        ids: (1, N) int64, the text; N of at least 1.

    Attributes:
        length: how many tokens were read.
        last: (vocabulary,) the logits after the last of them.

    Raises:
        ValueError: a model in training mode.
    """

    def __init__(self, model: Any, ids: Tensor) -> None:
        from transformers import DynamicCache

        if model.training:
            raise ValueError("the model is in training mode: model.eval()")
        self.model, self.length = model, ids.shape[1]
        self.cache = DynamicCache(config=model.config)
        self.last = self._forward(ids, logits_to_keep=1).logits[0, -1]

    def extend(self, ids: Tensor) -> Tensor:
        """Read on, (1, n) more tokens; return the logits before each of them: (n, vocabulary)."""
        logits = self._forward(ids).logits[0]
        before = torch.cat([self.last[None], logits[:-1]])
        self.length, self.last = self.length + ids.shape[1], logits[-1]
        return before

    def ask(self, ids: Tensor, *, without: tuple[int, int] | None = None) -> Tensor:
        """Return the logits after a continuation, (vocabulary,), and forget the continuation.

        Args:
            ids: (1, n) int64.
            without: tokens [start, end) of the text that the continuation may not look at. Later
                tokens of the text have seen them and still hold what they took from them.
        """
        options: dict[str, Any] = {"logits_to_keep": 1}
        if without is not None:
            mask = torch.ones(1, self.length + ids.shape[1], dtype=torch.long)
            mask[:, slice(*without)] = 0
            options["attention_mask"] = mask.to(self.model.device)
        try:
            return self._forward(ids, **options).logits[0, -1]
        finally:
            self._forget()

    def attention(self, ids: Tensor) -> Tensor:
        """Return where the last token of a continuation looks: (layers, heads, length), float32.

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
        return torch.stack([weights[0, :, 0, : self.length] for weights in out.attentions]).float()

    @torch.no_grad()
    def _forward(self, ids: Tensor, **options: Any) -> Any:
        ids = ids.to(self.model.device)
        start = self.cache.get_seq_length()
        options["position_ids"] = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        return self.model(ids, past_key_values=self.cache, use_cache=True, **options)

    def _forget(self) -> None:
        extra = self.cache.get_seq_length() - self.length
        if extra:
            self.cache.crop(-extra)  # newer versions of Transformers take this form only


@torch.no_grad()
def nll_by_window(model: Any, ids: Tensor, target: slice, windows: Sequence[int]) -> pd.DataFrame:
    """Measure the mean negative log-likelihood of a passage, by the tokens seen before it.

    For a window w, the model reads ids[target.start - w : target.stop] from position 0 on, and the
    tokens of the target are scored.

    Args:
        model: a Transformers causal language model in eval mode.
        ids: (1, N) int64.
        target: which tokens are scored, ids[:, target]; it begins at 1 or later.
        windows: tokens before the target, each at least 1; more than there are is all of them.

    Returns:
        One row a window: window; seen, the tokens before the target that there really were; nll, in
        nats a token, taken in float32; tokens, how many were scored.

    Raises:
        ValueError: a target outside of the text, empty or at its very beginning; a window below 1.
    """
    import pandas as pd

    start, stop, _ = target.indices(ids.shape[1])
    if not 1 <= start < stop or (target.stop or 0) > ids.shape[1] or min(windows) < 1:
        raise ValueError(
            f"{target} is no passage of {ids.shape[1]} tokens that begins at 1 or later, or a "
            f"window of {list(windows)} is below 1"
        )
    rows = []
    for window in windows:
        first = max(0, start - window)
        reading = Reading(model, ids[:, first:start])
        total = 0.0
        for at in range(start, stop, CHUNK):
            part = ids[:, at : min(at + CHUNK, stop)]
            logits = reading.extend(part).float()
            total += F.cross_entropy(logits, part[0].to(logits.device), reduction="sum").item()
        rows.append((window, start - first, total / (stop - start), stop - start))
    return pd.DataFrame(rows, columns=["window", "seen", "nll", "tokens"])


@dataclass(frozen=True)
class Repeat:
    """A text in which a passage stands twice.

    Attributes:
        ids: (1, N) int64.
        first, target: the two occurrences, as slices of the tokens. A window of `distance`, from
            beginning to beginning, sees the first one whole.
    """

    ids: Tensor
    first: slice
    target: slice

    @property
    def distance(self) -> int:
        """Tokens from the beginning of the first occurrence to that of the second."""
        return self.target.start - self.first.start


def with_repeat(
    tokenizer: Any,
    text: str,
    passage: str,
    *,
    distance: int = 1024,
    length: int = 128,
    lead: int = 64,
) -> Repeat:
    """Make a text in which a passage of another text returns after some distance.

    Args:
        tokenizer: of the model.
        text: the text around, at least `lead` + `distance` - `length` tokens.
        passage: its first `length` tokens stand there twice.
        distance: from beginning to beginning, in tokens; at least `length`.
        length: of the passage, in tokens.
        lead: tokens of the text before the first occurrence, 1 or more.

    Raises:
        ValueError: too short a text or passage; a distance below `length`; a text that holds the
            passage already.
    """
    if distance < length or lead < 1:
        raise ValueError(f"{distance=} must be at least {length=}, and {lead=} at least 1")
    twice = tokens_of(tokenizer, passage, length)
    around = tokens_of(tokenizer, text, lead + distance - length)
    if tokenizer.decode(twice[0], skip_special_tokens=True).strip() in text:
        raise ValueError("the text holds the passage already: take one from another file")
    ids = torch.cat([around[:, :lead], twice, around[:, lead:], twice], dim=1)
    return Repeat(ids, slice(lead, lead + length), slice(lead + distance, lead + distance + length))
