"""Find and answer: facts planted in a real document, asked for at its end, with evidence.

    |............ fact 1 ............ fact 2 ............ fact 3 .....|  The mascot of the mill is
                             |<------------- window ----------------->|  <------ question ------>

A model that sees the last `window` tokens can only find the facts that stand in them: so the share
of right answers rises with the window. A search for common words finds them as well, and needs no
model: such questions show what a context is for, and not that a model is needed.

Evidence is named in two steps, and then checked. The last token's attention proposes some sentences
of the visible text. Then the question is asked again without each of them (their keys are masked):
the one without which the given answer loses most is the evidence. It is right if it is the planted
sentence. (What attention looks at need not be what the answer rests on: Jain and Wallace,
"Attention is not Explanation", 2019, section 4. Leaving a sentence out is a test of that, which
DeYoung et al., "ERASER", 2020, section 4, call comprehensiveness.)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from labsupport.training.tasks.planted import (
    Planted,
    latest_candidate,
    search_answer,
    sentences_of,
)
from labsupport.training.tasks.reading import Reading

if TYPE_CHECKING:
    import pandas as pd


def answer_by_window(
    model: Any,
    tokenizer: Any,
    document: Planted,
    windows: Sequence[int],
    *,
    evidence: int = 4,
) -> pd.DataFrame:
    """Ask for each fact of a document, for each window; the text is read once a window.

    Args:
        model: a Transformers causal language model in eval mode.
        tokenizer: its tokenizer, of the kind that knows which characters a token covers.
        document: as `plant` makes it.
        windows: how many of the document's last tokens are read; more than it has is all of them.
        evidence: how many sentences attention may propose; 0: no evidence is looked for.

    Returns:
        One row a window and fact: window; read, tokens that were read; place; depth, tokens from
        the fact's beginning to the document's end; visible, whether its whole sentence was read;
        answer, the likeliest candidate, and right; greedy, whether the likeliest of all tokens is
        the right word's first; recent, whether the candidate that stands last is right; search,
        whether `search_answer` is right; chance, of a guess; evidence, the named sentence;
        evidence_right, whether it is the planted one; lost, whether the answer changes without it.
        The last three are None with `evidence=0`.

    Raises:
        ValueError: candidates that begin with the same token.
    """
    import pandas as pd

    encoded = tokenizer(
        document.text, return_offsets_mapping=True, add_special_tokens=False, verbose=False
    )
    ids, spans = torch.tensor([encoded["input_ids"]]), encoded["offset_mapping"]
    firsts = [int(_encode(tokenizer, " " + word)[0, 0]) for word in document.candidates]
    if len(set(firsts)) < len(firsts):
        raise ValueError("two candidates begin with the same token of this tokenizer")
    rows = []
    for window in windows:
        first = max(0, ids.shape[1] - window)
        reading = Reading(model, ids[:, first:])
        begin = spans[first][0]
        text = document.text[begin:]
        for fact in document.facts:
            question = _encode(tokenizer, fact.question)
            logits = reading.ask(question)[-1].float()
            answer = document.candidates[int(logits[firsts].argmax())]
            row: dict[str, Any] = {
                "window": window,
                "read": reading.length,
                "place": fact.place,
                "depth": ids.shape[1] - _token_at(spans, fact.start),
                "visible": begin <= fact.start,
                "answer": answer,
                "right": answer == fact.word,
                "greedy": int(logits.argmax()) == firsts[document.candidates.index(fact.word)],
                "recent": latest_candidate(text, document.candidates) == fact.word,
                "search": search_answer(fact.question, text, document.candidates) == fact.word,
                "chance": 1 / len(document.candidates),
                "evidence": None,
                "evidence_right": None,
                "lost": None,
            }
            if evidence:
                ranges = _token_ranges(spans[first:], sentences_of(text), begin)
                named, lost = _evidence(
                    reading, question, firsts, document.candidates.index(answer), ranges, evidence
                )
                start, end = sentences_of(text)[named]
                row["evidence"] = " ".join(text[start:end].split())
                row["evidence_right"] = start <= fact.start - begin < end
                row["lost"] = lost
            rows.append(row)
    return pd.DataFrame(rows)


def _evidence(
    reading: Reading,
    question: Tensor,
    firsts: list[int],
    answer: int,
    sentences: list[tuple[int, int]],
    propose: int,
) -> tuple[int, bool]:
    """Which sentence, of token ranges, the answer rests on; whether it changes without it.

    `answer` is the given candidate's number; `firsts` are the candidates' tokens.
    """
    weights = reading.attention(question)
    # Squares favour a head that looks at one place over many that look everywhere. The first token
    # is where heads look that look for nothing (Xiao et al., "Efficient Streaming Language Models
    # with Attention Sinks", 2023, section 3).
    weights[..., 0] = 0.0
    looked = weights.square().sum((0, 1)).cpu()
    mass = torch.stack([looked[start:end].sum() for start, end in sentences])
    proposed = mass.topk(min(propose, len(sentences))).indices.tolist()
    without = {
        number: reading.ask(question, without=sentences[number])[-1].float().log_softmax(-1)
        for number in proposed
    }
    named = min(proposed, key=lambda number: float(without[number][firsts[answer]]))
    return named, int(without[named][firsts].argmax()) != answer


def score_answers(table: pd.DataFrame) -> pd.DataFrame:
    """The shares of `answer_by_window`, by window.

    Returns:
        One row a window: window, questions; visible; right, greedy, recent, search, chance;
        right_visible, of those whose fact was read; evidence_right and lost, of the right answers
        whose fact was read.
    """
    import pandas as pd

    rows = []
    for window, part in table.groupby("window"):
        seen = part[part["visible"]]
        based = seen[seen["right"]]
        rows.append(
            {"window": window, "questions": len(part)}
            | {name: part[name].mean() for name in ("visible", "right", "greedy")}
            | {name: part[name].mean() for name in ("recent", "search")}
            | {"chance": part["chance"].mean(), "right_visible": seen["right"].mean()}
            | {name: based[name].astype(float).mean() for name in ("evidence_right", "lost")}
        )
    return pd.DataFrame(rows)


def _encode(tokenizer: Any, text: str) -> Tensor:
    return torch.tensor([tokenizer.encode(text, add_special_tokens=False)])


def _token_at(spans: Sequence[tuple[int, int]], character: int) -> int:
    return bisect_right([end for _, end in spans], character)


def _token_ranges(
    spans: Sequence[tuple[int, int]], parts: Sequence[tuple[int, int]], begin: int
) -> list[tuple[int, int]]:
    """Parts of a text, as characters counted from `begin`, as ranges of its tokens."""
    starts, ends = [start - begin for start, _ in spans], [end - begin for _, end in spans]
    return [(bisect_right(ends, start), bisect_left(starts, end)) for start, end in parts]
