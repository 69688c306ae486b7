"""A summary by a small model, judged by counts, and compared with the simplest summary.

The documents are chapters of Python's own help, without their headings:

    supported   the share of the summary's words that the document has, too; others are made up
    copied      the share of its sentences that stand in the document as they are
    coverage    the share of the words of the headings that the summary has

No number says that a summary is right: one that turns a sentence into its opposite with the same
words keeps all three. The baseline is the document's first sentences, as many words as the model
wrote: often hard to beat.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from benchmarks.long_texts.documents import sentences_of
from labsupport.commands.generate import SUMMARY
from labsupport.models import generate

INSTRUCTION = f"\n\n{SUMMARY}"
LENGTH = 1024  # tokens of the document that the model gets
_HEADING = re.compile(r"^(\S.*)\n([=*\-~^])\2{3,}$", re.MULTILINE)
# Words of fewer than four letters are mostly grammar; so are these.
_EMPTY = frozenset(
    re.findall(
        r"\w+",
        "also about been both does each from have into more most only other same some such than "
        "that their them then there these they this used uses using very were what when where "
        "which will with your",
    )
)


class Chapter(NamedTuple):
    """A document, and the headings that stood in it."""

    text: str
    headings: list[str]


def chapter(text: str) -> Chapter:
    """Take the underlined headings out of a text of `python_topics`."""
    headings = [match.group(1) for match in _HEADING.finditer(text)]
    return Chapter(_HEADING.sub("", text).strip(), headings)


def content_words(text: str) -> set[str]:
    """Return the words of four letters and more, in small letters, without grammar."""
    return set(re.findall(r"[^\W\d_]{4,}", text.lower())) - _EMPTY


def judge_summary(summary: str, document: Chapter) -> dict[str, float]:
    """Count words, supported, copied and coverage (see above); each but words 0 to 1."""
    words = content_words(summary)
    topics = content_words(" ".join(document.headings))
    source = " ".join(document.text.split())
    sentences = [" ".join(summary[start:end].split()) for start, end in sentences_of(summary)]
    return {
        "words": len(summary.split()),
        "supported": len(words & content_words(document.text)) / max(len(words), 1),
        "copied": sum(sentence in source for sentence in sentences) / max(len(sentences), 1),
        "coverage": len(words & topics) / max(len(topics), 1),
    }


def lead(text: str, words: int) -> str:
    """Return the first sentences of a text: as few as have that many words."""
    end = 0
    for _, end in sentences_of(text):
        if len(text[:end].split()) >= words:
            break
    return text[:end]


def summarise(model: Any, tokenizer: Any, document: Chapter) -> tuple[str, dict[str, Any]]:
    """Let an instruction-tuned model summarise a document, and compare it with the lead.

    Returns:
        The summary; and `judge_summary` of "model" and "lead", against the whole document.
    """
    ids = tokenizer.encode(document.text, add_special_tokens=False, verbose=False)[:LENGTH]
    prompt = tokenizer.decode(ids) + INSTRUCTION
    summary = generate(model, tokenizer, prompt, max_new_tokens=96, chat=True).texts[0].strip()
    first = lead(document.text, len(summary.split()))
    return summary, {
        "model": judge_summary(summary, document),
        "lead": judge_summary(first, document),
    }
