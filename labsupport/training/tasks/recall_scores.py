"""How well a model finds facts again, by how much of the text it may see, and where it looks.

    ... text ... [ the fact ] ... text ... ... ? locker Kov: 47
                             |<---- window ---->|<- question ->|

For a window w the model reads the last w bytes of a document, and then the question. It is right if
every byte of the answer is its first choice. The answer's bytes are given while that is checked:
as long as they are the model's own first choices, it would have read the same bytes if it had
written them itself; so for the question whether all are right, nothing changes.

Each text is read once for all of its questions: they go on from its keys and values.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from labsupport.attention import attention
from labsupport.attention.rotary import apply_rotary_emb, rotary_angles
from labsupport.training.documents.dialogue import SENTENCES
from labsupport.training.documents.planting import MARK, FactDocument, Question
from labsupport.training.documents.tokens import ByteTokenizer
from labsupport.training.model import Decoder
from labsupport.training.model.layers import Block

if TYPE_CHECKING:
    import pandas as pd

SOLVERS = ("model", "pattern", "last value", "most frequent", "guess")
# The first layer's heads gather what stands up to six bytes back (`RECIPE.look_back`). So a fact
# can be read off the positions behind it, too.
BEHIND = 6
# What a value of each kind stands behind, whatever the key is.
ANY_VALUE = {"locker": r"locker \w+: (\d+)\."} | {
    kind: rf"{sentence.format(thing='[a-z ]+')}([^.\n]+)\." for kind, sentence in SENTENCES.items()
}


def accuracy_by_window(
    model: Decoder, documents: Sequence[FactDocument], windows: Sequence[int]
) -> pd.DataFrame:
    """Exact answers, by kind of question, window and solver.

    Args:
        model: as from `load_recall`, on any device.
        documents: ASCII texts with questions apart.
        windows: bytes before the question, each at least 1; more than the text has is all of it.

    Returns:
        One row for each kind, window and solver (`SOLVERS`): kind, window, solver, accuracy, chance
        (to guess), visible (share of questions whose fact lies in the window as a whole), n.
        "pattern" is a regular expression that knows how facts are written: it is right wherever the
        fact is visible, and no measure of the model. "last value" and "most frequent" take what the
        window holds of the question's kind; "guess" is the chance itself.

    Raises:
        ValueError: no questions; a text that asks its questions itself, or is not ASCII; a window
            below 1; a model with learned positions.
    """
    import pandas as pd

    _check(model, documents, windows)
    rows = []
    for window in windows:
        for document in documents:
            first = max(0, len(document.text) - window)
            seen = document.text[first:]
            right = [asked.right for asked in _ask(model, document, first)]
            for question, hit in zip(document.questions, right, strict=True):
                verdicts = {"model": float(hit), "guess": question.chance}
                for solver, answer in _by_rule(question, seen).items():
                    verdicts[solver] = float(answer == question.answer)
                rows += [
                    {
                        "kind": question.kind,
                        "window": window,
                        "solver": solver,
                        "accuracy": verdicts[solver],
                        "chance": question.chance,
                        "visible": float(question.evidence[0] >= first),
                        "n": 1,
                    }
                    for solver in SOLVERS
                ]
    groups = pd.DataFrame(rows).groupby(["kind", "window", "solver"], sort=False)
    means = groups[["accuracy", "chance", "visible"]].mean()
    return means.join(groups["n"].sum()).reset_index()


def looks(model: Decoder, documents: Sequence[FactDocument]) -> pd.DataFrame:
    """Where each head looks when the answer's first byte is due: the key of the largest weight.

    Returns:
        One row for each question, layer and head: document, question (their places), kind, right
        (the answer), layer, head, position (in the text; behind its end: in the question), weight,
        start, end (the evidence's), inside (whether the position lies in the evidence), found
        (inside, or at most `BEHIND` bytes behind it), chance (to be found by a position at random).

    Raises: as `accuracy_by_window`.
    """
    import pandas as pd

    _check(model, documents, [1])
    rows = []
    for place, document in enumerate(documents):
        for number, asked in enumerate(_ask(model, document, 0)):
            question = document.questions[number]
            start, end = question.evidence
            for layer, weights in enumerate(asked.weights):
                largest, positions = weights.max(-1)
                for head, position in enumerate(positions.tolist()):
                    rows.append(
                        {
                            "document": place,
                            "question": number,
                            "kind": question.kind,
                            "right": asked.right,
                            "layer": layer,
                            "head": head,
                            "position": position,
                            "weight": largest[head].item(),
                            "start": start,
                            "end": end,
                            "inside": start <= position < end,
                            "found": start <= position < end + BEHIND,
                            "chance": (end + BEHIND - start) / weights.shape[-1],
                        }
                    )
    return pd.DataFrame(rows)


def evidence_head(
    model: Decoder, calibration: Sequence[FactDocument], documents: Sequence[FactDocument]
) -> dict[str, float]:
    """The head that looks at the evidence most often, chosen on some documents, scored on others.

    Returns:
        layer, head, calibration (the share of questions in which it looks at the evidence, there),
        found, inside, chance (as in `looks`, on `documents`), n (their questions).

    Raises: as `accuracy_by_window`.
    """
    shares = looks(model, calibration).groupby(["layer", "head"])["found"].mean()
    layer, head = cast(tuple[int, int], shares.idxmax())
    others = looks(model, documents)
    others = others[(others["layer"] == layer) & (others["head"] == head)]
    return {
        "layer": int(layer),
        "head": int(head),
        "calibration": float(shares.max()),
        "found": float(others["found"].mean()),
        "inside": float(others["inside"].mean()),
        "chance": float(others["chance"].mean()),
        "n": len(others),
    }


@dataclass(frozen=True)
class _Asked:
    """Whether the answer was right; for each layer the weights (heads, keys) of its first byte."""

    right: bool
    weights: list[Tensor]


@torch.no_grad()
def _ask(model: Decoder, document: FactDocument, first: int) -> Iterator[_Asked]:
    """Every question of a document whose text begins at `first`."""
    bytes_, device = ByteTokenizer(), model.embedding.weight.device
    prompts = [bytes_.encode(question.prompt) for question in document.questions]
    answers = [bytes_.encode(question.answer) for question in document.questions]
    length = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    # What pads a row stands behind its answer, where nothing sees it.
    asked = torch.tensor(
        [
            (p + a + [bytes_.end_token] * length)[:length]
            for p, a in zip(prompts, answers, strict=True)
        ],
        device=device,
    )
    text = torch.tensor([bytes_.encode(document.text[first:])], device=device)
    _, _, past = read_on(model, text)
    hidden, queries, keys = read_on(model, asked, past)
    best = model.head(hidden).argmax(-1)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        last = len(prompt) - 1
        written = best[row, last : last + len(answer)].tolist()
        weights = []
        for query, (key, _) in zip(queries, keys, strict=True):
            visible = key[row, : text.shape[1] + last + 1]
            q = query[row, last].unflatten(0, (visible.shape[1], -1)).float()  # grouped heads
            scores = torch.einsum("kgd,skd->kgs", q, visible.float()).flatten(0, 1)
            weights.append((scores / query.shape[-1] ** 0.5).softmax(-1).cpu())
        yield _Asked(written == answer, weights)


Past = list[tuple[Tensor, Tensor]]


@torch.no_grad()
def read_on(
    model: Decoder, tokens: Tensor, past: Past | None = None
) -> tuple[Tensor, list[Tensor], Past]:
    """What `Decoder.hidden` computes, behind a text that has been read before.

    Args:
        model: with rotary positions.
        tokens: (batch, seqlen) int64.
        past: what this function gave for the text before: of the same batch, or of batch 1, which
            all rows then share.

    Returns:
        Hidden states (batch, seqlen, width); for each layer the queries (batch, seqlen, heads,
        head_dim); for each layer keys and values (batch, before + seqlen, kv_heads, head_dim).
    """
    config = model.config
    before = 0 if past is None else past[0][0].shape[1]
    positions = torch.arange(before, before + tokens.shape[1], device=tokens.device)
    angles = rotary_angles(
        positions, config.head_dim, base=config.rope_base, scaling=config.rope_scaling
    )
    x = model.embedding(tokens)
    queries: list[Tensor] = []
    kept: Past = []
    for layer, block in enumerate(cast(list[Block], list(model.blocks))):
        part, normed = block.attention, block.attention_norm(x)
        q, k, v = (
            project(normed).unflatten(-1, (-1, config.head_dim))
            for project in (part.query, part.key, part.value)
        )
        q, k = (apply_rotary_emb(t, *angles, interleaved=config.rope_interleaved) for t in (q, k))
        if past is not None:
            k, v = (
                torch.cat([old.expand(len(new), -1, -1, -1), new], 1)
                for old, new in zip(past[layer], (k, v), strict=True)
            )
        queries.append(q)
        kept.append((k, v))
        out = attention(q, k, v, causal=True, backend=model.savings.attention)
        assert isinstance(out, Tensor)  # nobody asked for the log-sum-exp
        x = x + part.out(out.flatten(2))
        x = x + block.mlp(block.mlp_norm(x))
    return model.norm(x), queries, kept


def _by_rule(question: Question, seen: str) -> dict[str, str | None]:
    """What solvers without a model answer; None: nothing."""
    values = re.findall(ANY_VALUE[question.kind], seen)
    key = question.prompt.removeprefix(MARK)
    found = re.findall(re.escape(key) + r"([^.\n]+)\.", seen)
    return {
        "pattern": found[-1] if found else None,
        "last value": values[-1] if values else None,
        "most frequent": Counter(values).most_common(1)[0][0] if values else None,
    }


def _check(model: Decoder, documents: Sequence[FactDocument], windows: Sequence[int]) -> None:
    if model.config.positions != "rotary":
        raise ValueError("a window is read from position 0 on, which takes rotary positions")
    if not documents or not all(document.questions for document in documents):
        raise ValueError("give documents, each with at least one question")
    if any(q.answered is not None for d in documents for q in d.questions):
        raise ValueError('these texts ask their questions themselves: make them with ask="apart"')
    if not all(document.text.isascii() for document in documents):
        raise ValueError("evidence counts characters and windows count bytes: ASCII texts only")
    if not windows or min(windows) < 1:
        raise ValueError(f"windows are 1 or more bytes, not {list(windows)}")
