"""Scores of finding facts again, by the text that a model may see.

    ... text ... [ the fact ] ... text ... ... ? locker Kov: 47
                             |<---- window ---->|<- question ->|

For a window w the model reads the last w bytes of a document, once for all questions, and goes on
from its keys and values. It is right if every byte of the answer is its first choice. The answer's
bytes are given while that is checked: for a right answer, it would have written them itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from labsupport.attention import attention
from labsupport.training.decoder import Block, Decoder
from labsupport.training.tasks.facts import MARK, SENTENCES, FactDocument, Question
from labsupport.training.tokens import ByteTokenizer

if TYPE_CHECKING:
    import pandas as pd

SOLVERS = ("model", "pattern", "last value", "guess")
Past = list[tuple[Tensor, Tensor]]


def accuracy_by_window(
    model: Decoder, documents: Sequence[FactDocument], windows: Sequence[int]
) -> pd.DataFrame:
    """Score exact answers, by kind of question, window and solver.

    Args:
        model: as from `load_recall`, on any device.
        documents: with questions apart.
        windows: bytes before the question, each at least 1; more than the text has is all of it.

    Returns:
        One row for each kind, window and solver (`SOLVERS`): kind, window, solver, accuracy, chance
        (to guess), visible (share of questions whose fact lies in the window as a whole), n.
        "pattern" is a regular expression that knows how facts are written: it is right wherever the
        fact is visible, and no measure of the model. "last value" is the last of the question's
        kind in the window; "guess" is the chance itself.

    Raises:
        ValueError: a text that asks its questions itself; a window below 1; a model with learned
            positions.
    """
    import pandas as pd

    if model.config.positions != "rotary" or not windows or min(windows) < 1:
        raise ValueError(f"give a model with rotary positions, and windows above 0: {windows}")
    if any(document.answers for document in documents):
        raise ValueError('these texts ask their questions themselves: make them with ask="apart"')
    rows = []
    for window in windows:
        for document in documents:
            first = max(0, len(document.text) - window)
            seen = document.text[first:]
            right = list(_ask(model, document, first))
            for question, hit in zip(document.questions, right, strict=True):
                scores = {"model": float(hit), "guess": question.chance}
                for solver, answer in _by_rule(question, seen).items():
                    scores[solver] = float(answer == question.answer)
                visible = float(question.evidence[0] >= first)
                rows += [
                    (question.kind, window, solver, scores[solver], question.chance, visible, 1)
                    for solver in SOLVERS
                ]
    columns = ["kind", "window", "solver", "accuracy", "chance", "visible", "n"]
    groups = pd.DataFrame(rows, columns=columns).groupby(columns[:3], sort=False)
    means = groups[["accuracy", "chance", "visible"]].mean()
    return means.join(groups["n"].sum()).reset_index()


@torch.no_grad()
def _ask(model: Decoder, document: FactDocument, first: int) -> Iterator[bool]:
    """Ask every question of a document whose text begins at `first`; yield True for the right."""
    bytes_, device = ByteTokenizer(), model.embedding.weight.device
    prompts = [bytes_.encode(question.prompt) for question in document.questions]
    answers = [bytes_.encode(question.answer) for question in document.questions]
    both = [p + a for p, a in zip(prompts, answers, strict=True)]
    length = max(map(len, both))
    # What pads a row stands after its answer, where nothing sees it.
    padded = [(row + [bytes_.end_token] * length)[:length] for row in both]
    text = torch.tensor([bytes_.encode(document.text[first:])], device=device)
    _, past = read_on(model, text)
    hidden, _ = read_on(model, torch.tensor(padded, device=device), past)
    best = model.head(hidden).argmax(-1)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        last = len(prompt) - 1
        yield best[row, last : last + len(answer)].tolist() == answer


@torch.no_grad()
def read_on(model: Decoder, tokens: Tensor, past: Past | None = None) -> tuple[Tensor, Past]:
    """Compute what `Decoder.hidden` does, after a text that has been read before.

    Args:
        model: with rotary positions.
        tokens: (batch, seqlen) int64.
        past: what this function returned for the text before: of the same batch, or of batch 1,
            which all rows then share.

    Returns:
        Hidden states (batch, seqlen, width); for each layer keys and values (batch, before +
        seqlen, kv_heads, head_dim).

    Raises:
        ValueError: learned positions; a past of another batch or another model.
    """
    rows = set() if past is None else {len(k) for k, _ in past}
    if (
        model.config.positions != "rotary"
        or not rows <= {1, len(tokens)}
        or (past is not None and len(past) != len(model.blocks))
    ):
        raise ValueError(
            f"{model.config.positions} positions, {len(tokens)} rows, a past of {rows or 'no'} "
            f"rows and {len(past or ())} layers: rotary positions, as many rows or 1, and "
            f"{len(model.blocks)} layers are needed"
        )
    before = 0 if past is None else past[0][0].shape[1]
    positions = torch.arange(before, before + tokens.shape[1], device=tokens.device)
    turn = model.turn(positions)
    x = model.embedding(tokens)
    kept: Past = []
    for layer, block in enumerate(cast(list[Block], list(model.blocks))):
        q, k, v = block.attention.project(block.attention_norm(x), turn)
        if past is not None:
            k, v = (
                torch.cat([old.expand(len(new), -1, -1, -1), new], 1)
                for old, new in zip(past[layer], (k, v), strict=True)
            )
        kept.append((k, v))
        out = attention(q, k, v, causal=True, backend=model.savings.attention)
        assert isinstance(out, Tensor)  # the log-sum-exp is not returned
        x = x + block.attention.out(out.flatten(2))
        x = x + block.mlp(block.mlp_norm(x))
    return model.norm(x), kept


def _by_rule(question: Question, seen: str) -> dict[str, str | None]:
    """Return what solvers without a model answer; None: nothing."""
    thing = r"\w+" if question.kind == "locker" else "[a-z ]+"
    value = r"(\d+)" if question.kind == "locker" else r"([^.\n]+)"
    values = re.findall(SENTENCES[question.kind].format(thing=thing) + value + r"\.", seen)
    key = question.prompt.removeprefix(MARK)
    found = re.findall(re.escape(key) + r"([^.\n]+)\.", seen)
    return {
        "pattern": found[-1] if found else None,
        "last value": values[-1] if values else None,
    }
