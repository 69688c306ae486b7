"""Find and answer: facts planted in a real document, asked for at its end, with evidence.

    |............ fact 1 ............ fact 2 ............ fact 3 .....|  The mascot of the mill is
                             |<------------- window ----------------->|  <------ question ------>

The share of right answers rises with the window. A search for common words finds the facts as well:
such questions show what a context is for, and not that a model is needed.

Evidence is named in two steps. The last token's attention proposes sentences of the visible text;
then the question is asked again without each of them (their keys are masked). The one without which
the given answer loses most is the evidence: what attention looks at need not be what the answer
rests on (Jain and Wallace, "Attention is not Explanation", 2019, section 4; DeYoung et al.,
"ERASER", 2020, section 4).
"""

from __future__ import annotations

import random
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from labsupport.training.facts import FactDocument, Question
from labsupport.training.tasks.windows import Reading

if TYPE_CHECKING:
    import pandas as pd

PLACES = re.findall(
    r"\w+",
    "harbour museum station theatre bakery hospital castle lighthouse chapel brewery market school "
    "prison garden mill bridge tower farm",
)
WORDS = re.findall(
    r"\w+",
    "tiger rabbit eagle wolf horse spider dragon lion bear fox snake monkey whale goat turtle "
    "sheep crow deer",
)
RELATIONS = re.findall(
    r"\w+",
    "password mascot emblem nickname codename statue guardian pet flag seal totem costume logo "
    "crest riddle painting",
)


def plant(
    tokenizer: Any, text: str, *, length: int = 2048, facts: int = 12, seed: int = 0
) -> FactDocument:
    """Plant facts between the paragraphs of a real document, evenly from its beginning to its end.

    The question is the fact's own beginning, and no two facts begin alike: a small model finds what
    is said in the same words, and mixes up facts that differ in one word alone.

    Args:
        tokenizer: a Transformers tokenizer; counts tokens.
        text: paragraphs, an empty line between them.
        length: the document is cut, at a paragraph, so that it has at most so many tokens.
        facts: how many; their words are drawn from fixed lists, without those of the text.
        seed: of the draw.

    Raises:
        ValueError: a text of too few paragraphs; more facts than there are words for.
    """
    # A word that the text has itself would be a second answer.
    lists = [[word for word in known if word not in text] for known in (RELATIONS, PLACES, WORDS)]
    if not 2 <= facts <= min(map(len, lists)):
        raise ValueError(f"facts is 2 to {min(map(len, lists))} in this text, not {facts}")
    draw = random.Random(seed)
    drawn = zip(*(draw.sample(known, facts) for known in lists), strict=True)
    pairs = [(f"The {relation} of the {place} is", word) for relation, place, word in drawn]
    sentences = [f"{prompt} {word}." for prompt, word in pairs]

    def tokens(part: str) -> int:
        return len(tokenizer.encode(part + "\n\n", add_special_tokens=False, verbose=False))

    room = length - sum(map(tokens, sentences))
    paragraphs = []
    for paragraph in text.split("\n\n"):
        room -= tokens(paragraph)
        if room < 0:
            break
        paragraphs.append(paragraph)
    if len(paragraphs) < facts:
        raise ValueError(
            f"{len(paragraphs)} paragraphs fit into {length} tokens: too few for {facts} facts"
        )
    written, questions = "", []
    # After the paragraphs at 1/2n, 3/2n, 5/2n ... of the document.
    after = {int((i + 0.5) * len(paragraphs) / facts): i for i in range(facts)}
    for number, paragraph in enumerate(paragraphs):
        written += paragraph + "\n\n"
        if number in after:
            i = after[number]
            evidence = len(written), len(written) + len(sentences[i]) - 1  # without the full stop
            questions.append(Question("planted", *pairs[i], 1 / facts, evidence))
            written += sentences[i] + "\n\n"
    return FactDocument(written, tuple(questions))


def sentences_of(text: str) -> list[tuple[int, int]]:
    """Return the sentences as characters [start, end): up to a sign that ends one, or a gap."""
    pattern = r"\S.*?(?:[.:!?](?=\s)|(?=\n\s*\n)|\Z)"
    return [match.span() for match in re.finditer(pattern, text, re.DOTALL)]


def search_answer(question: str, text: str, candidates: Sequence[str]) -> str | None:
    """Return what a search finds: the candidate in the sentence with most words of the question.

    The latest of equally good sentences; None if it holds no candidate.
    """
    asked = set(_words(question))
    best = max(
        reversed([text[start:end] for start, end in sentences_of(text)]),
        key=lambda sentence: len(asked & set(_words(sentence))),
        default="",
    )
    return latest_candidate(best, candidates)


def latest_candidate(text: str, candidates: Sequence[str]) -> str | None:
    """Return the candidate that stands last in a text; None if it holds none."""
    found = [word for word in _words(text) if word in candidates]
    return found[-1] if found else None


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def answer_by_window(
    model: Any,
    tokenizer: Any,
    document: FactDocument,
    windows: Sequence[int],
    *,
    evidence: int = 4,
) -> pd.DataFrame:
    """Ask for each fact of a document, for each window; the text is read once a window.

    Args:
        model: a Transformers causal language model in eval mode.
        tokenizer: its tokenizer, of the kind that knows which characters a token covers.
        document: as `plant` makes it. Each word that a fact gives is a candidate.
        windows: how many of the document's last tokens are read; more than it has is all of them.
        evidence: how many sentences attention may propose; 0: no evidence is looked for.

    Returns:
        One row a window and fact: window; read, tokens that were read; depth, tokens from the
        fact's beginning to the document's end; visible, whether its whole sentence was read;
        answer, the likeliest candidate, and right; recent, whether the candidate that stands last
        is right; search, whether `search_answer` is right; chance, of a guess; evidence, the named
        sentence; evidence_right, whether it is the planted one; lost, whether the answer changes
        without it. The last three are None with `evidence=0`.

    Raises:
        ValueError: candidates that begin with the same token.
    """
    import pandas as pd

    def encode(text: str) -> Tensor:
        return torch.tensor([tokenizer.encode(text, add_special_tokens=False)])

    encoded = tokenizer(
        document.text, return_offsets_mapping=True, add_special_tokens=False, verbose=False
    )
    ids, spans = torch.tensor([encoded["input_ids"]]), encoded["offset_mapping"]
    candidates = [fact.answer for fact in document.questions]
    firsts = [int(encode(" " + word)[0, 0]) for word in candidates]
    if len(set(firsts)) < len(firsts):
        raise ValueError("two candidates begin with the same token of this tokenizer")
    rows = []
    for window in windows:
        first = max(0, ids.shape[1] - window)
        reading = Reading(model, ids[:, first:])
        begin = spans[first][0]
        text = document.text[begin:]
        sentences = sentences_of(text)
        starts, ends = zip(*((a - begin, b - begin) for a, b in spans[first:]), strict=True)
        ranges = [(bisect_right(ends, a), bisect_left(starts, b)) for a, b in sentences]
        for fact in document.questions:
            start, question = fact.evidence[0], encode(fact.prompt)
            logits = reading.ask(question).float()
            answer = candidates[int(logits[firsts].argmax())]
            row: dict[str, Any] = {
                "window": window,
                "read": reading.length,
                "depth": ids.shape[1] - bisect_right([end for _, end in spans], start),
                "visible": begin <= start,
                "answer": answer,
                "right": answer == fact.answer,
                "recent": latest_candidate(text, candidates) == fact.answer,
                "search": search_answer(fact.prompt, text, candidates) == fact.answer,
                "chance": fact.chance,
                "evidence": None,
                "evidence_right": None,
                "lost": None,
            }
            if evidence:
                named, row["lost"] = _evidence(
                    reading, question, firsts, candidates.index(answer), ranges, evidence
                )
                a, b = sentences[named]
                row["evidence"] = " ".join(text[a:b].split())
                row["evidence_right"] = a <= start - begin < b
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
    """Return the sentence that the answer rests on, and whether the answer changes without it.

    `answer` is the given candidate's number; `firsts` are the candidates' tokens; sentences are
    ranges of tokens.
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
        number: reading.ask(question, without=sentences[number]).float().log_softmax(-1)
        for number in proposed
    }
    named = min(proposed, key=lambda number: float(without[number][firsts[answer]]))
    return named, int(without[named][firsts].argmax()) != answer


def score_answers(table: pd.DataFrame) -> pd.DataFrame:
    """Return the shares of `answer_by_window`, by window.

    Returns:
        One row a window: window, questions; visible; right, recent, search, chance;
        right_visible, of those whose fact was read; evidence_right and lost, of the right answers
        whose fact was read.
    """
    import pandas as pd

    rows = []
    for window, part in table.groupby("window"):
        seen = part[part["visible"]]
        based = seen[seen["right"]]
        shares = ("visible", "right", "recent", "search", "chance")
        rows.append(
            {"window": window, "questions": len(part)}
            | {name: part[name].mean() for name in shares}
            | {"right_visible": seen["right"].mean()}
            | {name: based[name].astype(float).mean() for name in ("evidence_right", "lost")}
        )
    return pd.DataFrame(rows)
