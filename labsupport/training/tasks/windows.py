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
from labsupport.models.generation.prompts import check_model

if TYPE_CHECKING:
    import pandas as pd


@torch.no_grad()
def nll_by_window(model: Any, ids: Tensor, target: slice, windows: Sequence[int]) -> pd.DataFrame:
    """Measure the mean negative log-likelihood of a passage, by the tokens seen before it.

    For a window w, the model reads ids[target.start - w : target.stop] from position 0 on, and the
    tokens of the target are scored.

    Args:
        model: a Transformers causal language model in eval mode.
        ids: (1, N) int64.
        target: which tokens are scored, ids[:, target]; it begins at 1 or later, and counts from
            the beginning.
        windows: tokens before the target, each at least 1; more than there are is all of them.

    Returns:
        One row a window: window; seen, the tokens before the target that there really were; nll, in
        nats a token, taken in float32; tokens, how many were scored.

    Raises:
        ValueError: several texts; a target outside of the text, empty, with gaps, or at its very
            beginning; no window, or one below 1; a model in training mode with
            dropout.
    """
    import pandas as pd

    check_model(model)
    if ids.ndim != 2 or len(ids) != 1:
        raise ValueError(f"ids {tuple(ids.shape)} must be (1, N): one text")
    start, stop = target.start, ids.shape[1] if target.stop is None else target.stop
    passage = target.step in (None, 1) and start is not None and 1 <= start < stop <= ids.shape[1]
    if not passage or not windows or min(windows) < 1:
        raise ValueError(
            f"{target} is no passage of {ids.shape[1]} tokens that begins at 1 or later, or a "
            f"window of {list(windows)} is below 1"
        )
    rows = []
    for window in windows:
        read = ids[:, max(0, start - window) : stop].to(model.device)
        logits = model(read, use_cache=False, logits_to_keep=stop - start + 1).logits[0, :-1]
        nll = F.cross_entropy(logits.float(), read[0, start - stop :]).item()
        rows.append((window, read.shape[1] - (stop - start), nll, stop - start))
    return pd.DataFrame(rows, columns=["window", "seen", "nll", "tokens"])


@dataclass(frozen=True)
class Repeat:
    """A text that contains a passage twice.

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
        raise ValueError("the text holds the passage already: use one from another file")
    ids = torch.cat([around[:, :lead], twice, around[:, lead:], twice], dim=1)
    return Repeat(ids, slice(lead, lead + length), slice(lead + distance, lead + distance + length))
