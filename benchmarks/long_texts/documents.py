"""Find and answer: facts planted in a real document, asked for at its end.

    |............ fact 1 ............ fact 2 ............ fact 3 .....|  The mascot of the mill is
                             |<------------- window ----------------->|  <------ question ------>

The share of right answers rises with the window. A search for common words finds the facts as well:
such questions show what a context is for, and not that a model is needed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from labsupport.training.facts import FactDocument, Question

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
        length: the document is cut, at a paragraph, so that it has at most that many tokens.
        facts: how many; their words are drawn from fixed lists, without those of the text.
        seed: of the draw.

    Raises:
        ValueError: a text of too few paragraphs.
    """
    # A word that the text has itself would be a second answer.
    lists = [[word for word in known if word not in text] for known in (RELATIONS, PLACES, WORDS)]
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


class Reading:
    """A text that a model has read: its keys and values, for any number of questions.

    Each question after it costs its own tokens only: the cache is cut back afterwards.

    Args:
        model: a Transformers causal language model in eval mode, without sliding windows (their
            cache forgets what a question would have to give back).
        ids: (1, length) int64, the text.
    """

    def __init__(self, model: Any, ids: Tensor) -> None:
        from transformers import DynamicCache

        self.model, self.length = model, ids.shape[1]
        self.cache = DynamicCache(config=model.config)
        self.ask(ids)

    @torch.no_grad()
    def ask(self, ids: Tensor) -> Tensor:
        """Return the logits after a question (1, n), (vocabulary,), and forget the question."""
        ids, start = ids.to(self.model.device), self.cache.get_seq_length()
        options: dict[str, Any] = {"past_key_values": self.cache, "use_cache": True}
        options["position_ids"] = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        logits = self.model(ids, logits_to_keep=1, **options).logits[0, -1]
        # Newer versions of Transformers take this form only.
        self.cache.crop(self.length - self.cache.get_seq_length())
        return logits


def answer_by_window(
    model: Any, tokenizer: Any, document: FactDocument, windows: Sequence[int]
) -> pd.DataFrame:
    """Ask for each fact of a document, for each window; the text is read once a window.

    Args:
        model, tokenizer: of Transformers; the tokenizer knows which characters a token covers.
        document: as `plant` makes it. Each word that a fact gives is a candidate.
        windows: how many of the document's last tokens are read; more than it has is all of them.

    Returns:
        One row a window and fact: window; visible, whether its whole sentence was read; answer, the
        likeliest candidate, and right; recent, whether the candidate that stands last is right;
        search, whether `search_answer` is right; chance, of a guess.
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
    rows = []
    for window in windows:
        first = max(0, ids.shape[1] - window)
        reading, begin = Reading(model, ids[:, first:]), spans[first][0]
        text = document.text[begin:]
        for fact in document.questions:
            given = int(reading.ask(encode(fact.prompt))[firsts].argmax())
            row: dict[str, Any] = {
                "window": window,
                "visible": begin <= fact.evidence[0],
                "answer": candidates[given],
                "right": candidates[given] == fact.answer,
                "recent": latest_candidate(text, candidates) == fact.answer,
                "search": search_answer(fact.prompt, text, candidates) == fact.answer,
                "chance": fact.chance,
            }
            rows.append(row)
    return pd.DataFrame(rows)


def score_answers(table: pd.DataFrame) -> pd.DataFrame:
    """Return the shares of `answer_by_window`, by window.

    Returns:
        One row a window: window, questions; visible; right, recent, search, chance;
        right_visible, of those whose fact was read.
    """
    import pandas as pd

    rows = []
    for window, part in table.groupby("window"):
        shares = ("visible", "right", "recent", "search", "chance")
        rows.append(
            {"window": window, "questions": len(part)}
            | {name: part[name].mean() for name in shares}
            | {"right_visible": part.right[part.visible].mean()}
        )
    return pd.DataFrame(rows)
