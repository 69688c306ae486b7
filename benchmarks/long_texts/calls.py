"""Calls in a file: a model completes a real file, and `ast` knows the truth.

At each call of a function or method that the file itself defines, the model has read the file up to
the name, and must give the name. What it sees can be copied; what stands further back it must
guess: so the score rises with the window. A file is read in blocks that overlap by half, and the
second half of each is scored: each site has half a window to a whole one before it.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    import pandas as pd

METHODS = ["model", "frequent", "latest", "search"]


class CallSite(NamedTuple):
    """A call in a file: the called name, and the characters [start, end) where it stands."""

    name: str
    start: int
    end: int


def call_sites(source: str) -> list[CallSite]:
    """Return every call of a function or method that this file defines, in order.

    By name alone: `x.get(...)` counts where the file defines any `get`, whatever `x` is.
    """
    nodes = list(ast.walk(ast.parse(source)))
    defined = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    lines = source.split("\n")  # as the parser counts them: splitlines() would cut at form feeds
    sites = []
    for node in nodes:
        called: Any = node.func if isinstance(node, ast.Call) else None
        name = getattr(called, "attr", None) or getattr(called, "id", None)
        if name in defined:
            # ast counts columns in bytes of UTF-8.
            last = lines[called.end_lineno - 1].encode()[: called.end_col_offset].decode()
            end = sum(len(line) + 1 for line in lines[: called.end_lineno - 1]) + len(last)
            sites.append(CallSite(name, end - len(name), end))
    return sorted(sites, key=lambda site: site.start)


def baselines(
    source: str, site: CallSite, before: Sequence[CallSite], visible: int
) -> dict[str, bool]:
    """Return whether each simple rule, without a model, names this call.

    `before` are the calls before this one in the visible text, which begins at character `visible`.
    """
    counts = Counter(earlier.name for earlier in before)
    context = source[visible : site.start]

    def agreement(earlier: CallSite) -> int:
        pairs = zip(reversed(context), reversed(source[visible : earlier.start]), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    alike = max(reversed(before), key=agreement, default=None)  # the latest of equals
    return {
        "frequent": bool(counts) and counts.most_common(1)[0][0] == site.name,
        "latest": bool(before) and before[-1].name == site.name,
        "search": alike is not None and alike.name == site.name,
    }


@torch.no_grad()
def predict_calls(model: Any, tokenizer: Any, source: str, window: int) -> pd.DataFrame:
    """Test whether the model's greedy continuation gives the called name, at each call site.

    The file's own tokens are fed; a name counts as given when each of its tokens is the likeliest
    one and the likeliest next one does not prolong it. That is what greedy decoding would write.
    A token that holds the name's beginning and a sign before it (" _", "._") counts as a whole.

    Args:
        model, tokenizer: of Transformers; the tokenizer knows which characters a token covers.
        source: a Python file.
        window: the most tokens that the model sees at a time: even, 4 or more.

    Returns:
        One row a site: window, start (its character), seen (tokens before it in its block),
        distance (tokens back to the last place where the name stood; 0: nowhere before),
        reachable (that place is among the tokens seen), model, and the baselines on the same
        visible text: frequent, its most frequent callee; latest, its last one; search, the callee
        of that earlier call whose text before the name agrees longest. The baselines know that a
        call of an own function comes here; the model does not.
    """
    import pandas as pd

    encoded = tokenizer(
        source, return_offsets_mapping=True, add_special_tokens=False, verbose=False
    )
    ids, spans = torch.tensor([encoded["input_ids"]]), encoded["offset_mapping"]
    starts, ends = zip(*spans, strict=True)
    words: dict[str, list[int]] = {}
    for match in re.finditer(r"[^\W\d]\w*", source):
        words.setdefault(match.group(), []).append(match.start())
    sites, half = call_sites(source), window // 2
    blocks: dict[int, list[tuple[CallSite, int, int]]] = {}
    for site in sites:
        # Tokens [first, end): the first that ends after the name's start.
        first, end = bisect_right(ends, site.start), bisect_left(starts, site.end)
        if first:  # nothing stands before the file's first token to predict it from
            blocks.setdefault(half * max(0, first // half - 1), []).append((site, first, end))
    rows = []
    for begin, block in sorted(blocks.items()):
        # Logits for the names' tokens only: the whole block's would be larger than the model.
        needed = sorted({t - begin - 1 for _, a, b in block for t in range(a, b + 1)})
        keep = torch.tensor(needed, device=model.device)
        inputs = ids[:, begin : max(end for _, _, end in block)].to(model.device)
        logits = model(inputs, use_cache=False, logits_to_keep=keep).logits[0]
        likeliest = dict(zip(needed, logits.argmax(-1).tolist(), strict=True))
        visible = spans[begin][0]
        for site, first, end in block:
            guess = [likeliest[t - begin - 1] for t in range(first, end + 1)]
            given = guess[:-1] == ids[0, first:end].tolist()
            # A name's last token may hold the sign after it, which ends it.
            ended = spans[end - 1][1] > site.end
            goes_on = not ended and bool(re.match(r"\w", tokenizer.decode(guess[-1:])))
            earlier = words[site.name][: bisect_left(words[site.name], site.start)]
            last = bisect_right(ends, earlier[-1]) if earlier else first
            before = [s for s in sites if visible <= s.start and s.end <= site.start]
            row = {"window": window, "start": site.start, "seen": first - begin}
            row |= {"distance": first - last, "reachable": begin <= last < first}
            row |= {"model": given and not goes_on} | baselines(source, site, before, visible)
            rows.append(row)
    return pd.DataFrame(rows)


def score_calls(table: pd.DataFrame) -> pd.DataFrame:
    """Return the share of right names by window, and by whether the name could be copied.

    Returns:
        One row a window and kind of sites ("all"; "in the window"; "further back": the name stood
        in the file before, but not in what the model sees; "new": nowhere before): window, sites,
        count, and the share of right names of each method.
    """
    import pandas as pd

    kinds = {
        "all": table.distance >= 0,
        "in the window": table.reachable,
        "further back": ~table.reachable & (table.distance > 0),
        "new": table.distance == 0,
    }
    parts = [table[of_kind].assign(sites=kind) for kind, of_kind in kinds.items()]
    groups = pd.concat(parts).groupby(["window", "sites"])[METHODS]
    return groups.mean().join(groups.size().rename("count")).reset_index()
