"""Which function is called here?  A model completes a real file, and `ast` knows the truth.

At each call of a function or method that the file itself defines, the model has read the file up to
the name, and must give the name. Where the name stands in what the model sees, it can be copied;
where it stands further back, the model has to guess it: so the score rises with the window.

A file is longer than a window, so it is read in blocks that overlap by half. The second half of a
block is scored: each site has half a window to a whole one before it, and the file is read twice.

    block 0   |====scored====|            the first block is scored as a whole
    block 1          |-------|==scored==|
    block 2                  |----------|==scored==|
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from labsupport.training.tasks.calls import (
    BASELINES,
    CallSite,
    Placed,
    baselines,
    call_sites,
    place,
)

if TYPE_CHECKING:
    import pandas as pd

METHODS = ("model", *BASELINES)


@torch.no_grad()
def predict_calls(
    model: Any,
    tokenizer: Any,
    source: str,
    window: int,
    *,
    sites: Sequence[CallSite] | None = None,
) -> pd.DataFrame:
    """Whether the model's greedy continuation gives the called name, at each call site.

    The file's own tokens are fed; a name counts as given when each of its tokens is the likeliest
    one and the likeliest next one does not prolong it. That is what greedy decoding would write.
    A token that holds the name's beginning and a sign before it (" _", "._") counts as a whole.

    Args:
        model: a Transformers causal language model in eval mode.
        tokenizer: its tokenizer, of the kind that knows which characters a token covers.
        source: a Python file.
        window: the most tokens that the model sees at once: even, 4 or more.
        sites: some of `call_sites(source)`; None: all. Blocks without one are not read.

    Returns:
        One row a site: window, name, start (its character), seen (tokens before it in its block),
        distance (tokens back to the last place where the name stood; 0: nowhere before),
        reachable (that place is among the tokens seen), model, and the baselines on the same
        visible text: frequent, its most frequent callee; latest, its last one; search, the callee
        of that earlier call whose text before the name agrees longest. All four are booleans. The
        baselines are told that a call of an own function comes here; the model is not.

    Raises:
        ValueError: a window that is odd, below 4, or beyond the model's positions.
        SyntaxError: the source is no Python.
    """
    import pandas as pd

    if window < 4 or window % 2:
        raise ValueError(f"window={window} must be even, and at least 4")
    encoded = tokenizer(
        source, return_offsets_mapping=True, add_special_tokens=False, verbose=False
    )
    ids, spans = torch.tensor([encoded["input_ids"]]), encoded["offset_mapping"]
    every = call_sites(source)
    half = window // 2
    blocks: dict[int, list[Placed]] = {}
    for placed in place(source, spans, every if sites is None else sites):
        begin = half * max(0, placed.first // half - 1)
        blocks.setdefault(begin, []).append(placed)
    rows = []
    for begin, here in sorted(blocks.items()):
        # Up to the last name of the block: that one may stand across the window's end.
        end = max(placed.end for placed in here)
        likeliest = _likeliest(
            model, ids[:, begin:end], [(p.first - begin, p.end - begin) for p in here]
        )
        for placed in here:
            site, first = placed.site, placed.first
            guess = likeliest[first - begin]
            given = guess[:-1] == ids[0, first : placed.end].tolist()
            # A name's last token may hold a sign behind it, which ends it.
            ends = spans[placed.end - 1][1] > site.end
            goes_on = not ends and bool(re.match(r"\w", tokenizer.decode(guess[-1:])))
            visible = spans[begin][0]
            before = [s for s in every if visible <= s.start and s.end <= site.start]
            rows.append(
                {
                    "window": window,
                    "name": site.name,
                    "start": site.start,
                    "seen": first - begin,
                    "distance": first - placed.last if placed.last is not None else 0,
                    "reachable": placed.last is not None and placed.last >= begin,
                    "model": given and not goes_on,
                    **baselines(source, site, before, visible),
                }
            )
    return pd.DataFrame(rows)


def _likeliest(model: Any, ids: Tensor, names: list[tuple[int, int]]) -> dict[int, list[int]]:
    """For each name, tokens [first, end): the likeliest token at each of them, and behind it.

    Logits are made for these positions only: the whole block's would be larger than the model.
    """
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and ids.shape[1] > limit:
        raise ValueError(f"a block has {ids.shape[1]} tokens, and the model {limit} positions")
    needed = sorted({place for first, end in names for place in range(first - 1, end)})
    keep = torch.tensor(needed, device=model.device)
    logits = model(ids.to(model.device), use_cache=False, logits_to_keep=keep).logits[0]
    behind = dict(zip(needed, logits.argmax(-1).tolist(), strict=True))
    return {first: [behind[place] for place in range(first - 1, end)] for first, end in names}


def score_calls(table: pd.DataFrame) -> pd.DataFrame:
    """The share of right names by window, for all sites and by whether the name could be copied.

    Args:
        table: rows of `predict_calls`, of one window or several.

    Returns:
        One row a window and kind of sites ("all"; "in the window"; "further back": the name stood
        in the file before, but not in what the model sees; "new": nowhere before): window, sites,
        count, and the share of right names of each method.
    """
    import pandas as pd

    kinds = {
        "all": table["distance"] >= 0,
        "in the window": table["reachable"],
        "further back": ~table["reachable"] & (table["distance"] > 0),
        "new": table["distance"] == 0,
    }
    rows = []
    for window in sorted(table["window"].unique()):
        for kind, of_kind in kinds.items():
            part = table[of_kind & (table["window"] == window)]
            rows.append(
                {"window": window, "sites": kind, "count": len(part)}
                | {method: part[method].mean() for method in METHODS}
            )
    return pd.DataFrame(rows)
