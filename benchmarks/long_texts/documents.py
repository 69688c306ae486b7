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
PROPOSED = 4  # sentences that attention may propose as evidence


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
        self._forward(ids)

    def ask(self, ids: Tensor, *, without: tuple[int, int] | None = None) -> Tensor:
        """Return the logits after a question (1, n), (vocabulary,), and forget the question.

        `without` are tokens [start, end) of the text that the question may not look at. Later
        tokens of the text have seen them and still hold what they took from them.
        """
        options: dict[str, Any] = {}
        if without is not None:
            mask = torch.ones(1, self.length + ids.shape[1], dtype=torch.long)
            mask[:, slice(*without)] = 0
            options["attention_mask"] = mask.to(self.model.device)
        logits = self._forward(ids, **options).logits[0, -1]
        self._forget()
        return logits

    def attention(self, ids: Tensor) -> Tensor:
        """Return where the last token of a question looks: (layers, heads, length), float32.

        FlashAttention never has a row of P as a whole, so this one token runs through Transformers'
        "eager" attention; its row is as long as the text, and no square.
        """
        chosen = self.model.config._attn_implementation
        if ids.shape[1] > 1:
            self._forward(ids[:, :-1])
        try:
            self.model.set_attn_implementation("eager")
            out = self._forward(ids[:, -1:], output_attentions=True)
        finally:
            self.model.set_attn_implementation(chosen)
        self._forget()
        return torch.stack([weights[0, :, 0, : self.length] for weights in out.attentions]).float()

    @torch.no_grad()
    def _forward(self, ids: Tensor, **options: Any) -> Any:
        ids, start = ids.to(self.model.device), self.cache.get_seq_length()
        options["position_ids"] = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        options |= {"past_key_values": self.cache, "use_cache": True, "logits_to_keep": 1}
        return self.model(ids, **options)

    def _forget(self) -> None:
        # Newer versions of Transformers take this form only.
        self.cache.crop(self.length - self.cache.get_seq_length())


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
        search, whether `search_answer` is right; chance, of a guess; evidence, the named sentence;
        evidence_right, whether it is the planted one; lost, whether the answer changes without it.
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
        sentences = sentences_of(text)
        starts, ends = zip(*((a - begin, b - begin) for a, b in spans[first:]), strict=True)
        ranges = [(bisect_right(ends, a), bisect_left(starts, b)) for a, b in sentences]
        for fact in document.questions:
            start, question = fact.evidence[0], encode(fact.prompt)
            given = int(reading.ask(question)[firsts].argmax())
            named, lost = _evidence(reading, question, firsts, given, ranges)
            a, b = sentences[named]
            row: dict[str, Any] = {
                "window": window,
                "visible": begin <= start,
                "answer": candidates[given],
                "right": candidates[given] == fact.answer,
                "recent": latest_candidate(text, candidates) == fact.answer,
                "search": search_answer(fact.prompt, text, candidates) == fact.answer,
                "chance": fact.chance,
                "evidence": " ".join(text[a:b].split()),
                "evidence_right": a <= start - begin < b,
                "lost": lost,
            }
            rows.append(row)
    return pd.DataFrame(rows)


def _evidence(
    reading: Reading,
    question: Tensor,
    firsts: list[int],
    given: int,
    sentences: list[tuple[int, int]],
) -> tuple[int, bool]:
    """Return the sentence that the answer rests on, and whether the answer changes without it.

    `given` is the answer's number; `firsts` are the candidates' tokens; sentences are ranges of
    tokens.
    """
    weights = reading.attention(question)
    # Squares favour a head that looks at one place over many that look everywhere. The first token
    # is where heads look that look for nothing (Xiao et al., "Efficient Streaming Language Models
    # with Attention Sinks", 2023, section 3).
    weights[..., 0] = 0.0
    looked = weights.square().sum((0, 1)).cpu()
    mass = torch.stack([looked[start:end].sum() for start, end in sentences])
    without = {
        number: reading.ask(question, without=sentences[number]).float().log_softmax(-1)[firsts]
        for number in mass.topk(min(PROPOSED, len(sentences))).indices.tolist()
    }
    named = min(without, key=lambda number: float(without[number][given]))
    return named, int(without[named].argmax()) != given


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
            | {name: based[name].mean() for name in ("evidence_right", "lost")}
        )
    return pd.DataFrame(rows)
