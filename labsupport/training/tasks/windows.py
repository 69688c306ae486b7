"""How much better a model predicts a passage when it sees more of what stands before it.

    ... text ... [ first time ] ... text ... ... ... [ the passage ]
                                     |<--- window -->|<-- target -->|

Everything inside of the passage is seen in any case; the window is what is seen before it. In plain
text most of what helps stands near, so the gain is small. Where something returns after a long
distance (a function that is called again, a licence, a quotation), the gain comes all at once: when
the window reaches the first occurrence, the model copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labsupport.training.tasks.reading import Reading

if TYPE_CHECKING:
    import pandas as pd


@torch.no_grad()
def nll_by_window(
    model: Any, ids: Tensor, target: slice, windows: Sequence[int], *, chunk: int = 128
) -> pd.DataFrame:
    """Mean negative log-likelihood of a passage, by how many tokens before it the model sees.

    For a window w, the model reads ids[target.start - w : target.stop] from position 0 on, and the
    tokens of the target are scored.

    Args:
        model: a Transformers causal language model in eval mode.
        ids: (1, N) int64.
        target: which tokens are scored, ids[:, target]; it begins at 1 or later.
        windows: tokens before the target, each at least 1; more than there are is all of them.
        chunk: tokens whose logits exist together; no result depends on it beyond rounding.

    Returns:
        One row a window: window; seen, the tokens before the target that there really were; nll, in
        nats a token, taken in float32; tokens, how many were scored.

    Raises:
        ValueError: a target outside of the text, empty, with a step or at its very beginning; a
            window below 1; more tokens than the model has positions.
    """
    import pandas as pd

    start, stop, step = target.indices(ids.shape[1])
    if step != 1 or not 1 <= start < stop or (target.stop or 0) > ids.shape[1]:
        raise ValueError(
            f"{target} is no passage of {ids.shape[1]} tokens that begins at 1 or later"
        )
    if min(windows) < 1:
        raise ValueError("a window is 1 or more: the first token is predicted from something")
    limit = getattr(model.config, "max_position_embeddings", None)
    longest = min(max(windows), start) + stop - start
    if limit is not None and longest > limit:
        raise ValueError(f"{longest} tokens, and the model has {limit} positions: smaller windows")
    rows = []
    for window in windows:
        first = max(0, start - window)
        reading = Reading(model, ids[:, first:start])
        total = 0.0
        for at in range(start, stop, chunk):
            part = ids[:, at : min(at + chunk, stop)]
            before = reading.last[None]
            logits = reading.extend(part, keep=part.shape[1])
            # The logits behind a token predict the next one.
            shifted = torch.cat([before, logits[:-1]]).float()
            total += F.cross_entropy(shifted, part[0].to(shifted.device), reduction="sum").item()
        rows.append(
            {
                "window": window,
                "seen": start - first,
                "nll": total / (stop - start),
                "tokens": stop - start,
            }
        )
    return pd.DataFrame(rows)


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
    """Real text, with a passage of other real text that returns after some distance.

    Args:
        tokenizer: of the model.
        text: what stands around, at least `lead` + `distance` - `length` tokens.
        passage: what stands there twice: its first `length` tokens.
        distance: from beginning to beginning, in tokens; at least `length`.
        lead: tokens of the text before the first occurrence, 1 or more.

    Raises:
        ValueError: too short a text or passage; a distance below `length`; a lead below 1; a text
            that holds the passage already.
    """
    from labsupport.models.sources.text import tokens_of

    if distance < length or lead < 1:
        raise ValueError(
            f"distance={distance} must be at least length={length}, and lead={lead} at least 1"
        )
    twice = tokens_of(tokenizer, passage, length)
    around = tokens_of(tokenizer, text, lead + distance - length)
    if tokenizer.decode(twice[0], skip_special_tokens=True).strip() in text:
        raise ValueError("the text holds the passage already: take one from another file")
    ids = torch.cat([around[:, :lead], twice, around[:, lead:], twice], dim=1)
    return Repeat(ids, slice(lead, lead + length), slice(lead + distance, lead + distance + length))
