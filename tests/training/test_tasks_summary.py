"""What is counted of a summary."""

import pytest

from labsupport.models import python_topics
from labsupport.training.tasks.summary import (
    Chapter,
    chapter,
    content_words,
    judge_summary,
    lead,
    summarise,
)
from tests.models.conftest import stories15m, stories_folder  # noqa: F401  fixtures

DOCUMENT = Chapter(
    "The fox sleeps under warm stones. Every winter it hides seven apples.\nNobody\nfinds them.",
    ("Foxes in winter", "Hidden apples"),
)


def test_headings_are_taken_out_of_a_chapter():
    found = chapter(python_topics()["async"])
    assert "Coroutine function definition" in found.headings
    assert not any(f"\n{heading}\n" in found.text for heading in found.headings)
    assert "====" not in found.text
    assert "****" not in found.text
    assert len(found.text) > 2000
    with pytest.raises(ValueError, match="no underlined headings"):
        chapter("A text.\n\nWithout any.")


def test_content_words_are_long_and_say_something():
    assert content_words("The Fox, which they SAW, hides _apples_ in 2024 with them") == {
        "hides",
        "apples",
    }


def test_a_copied_sentence_is_supported_and_copied_whatever_its_line_breaks():
    score = judge_summary("Every winter it\nhides seven apples. Nobody finds them.", DOCUMENT)
    assert score["words"] == 9
    assert score["supported"] == score["copied"] == 1.0
    assert score["coverage"] == 2 / 4  # winter and apples; foxes and hidden are missing


def test_what_is_made_up_is_not_supported():
    score = judge_summary("Wolves hate winter. Nobody finds them.", DOCUMENT)
    assert score["supported"] == 3 / 5  # wolves, hate; winter, nobody, finds
    assert score["copied"] == 0.5
    assert score["coverage"] == 1 / 4


def test_nothing_said_scores_nothing():
    assert judge_summary("", DOCUMENT) == {
        "words": 0,
        "supported": 0.0,
        "copied": 0.0,
        "coverage": 0.0,
    }


def test_the_lead_is_whole_sentences_as_few_as_have_that_many_words():
    assert lead(DOCUMENT.text, 1) == "The fox sleeps under warm stones."
    assert lead(DOCUMENT.text, 6) == "The fox sleeps under warm stones."
    assert lead(DOCUMENT.text, 7).endswith("apples.")
    assert lead(DOCUMENT.text, 999) == DOCUMENT.text
    score = judge_summary(lead(DOCUMENT.text, 7), DOCUMENT)
    assert score["supported"] == score["copied"] == 1.0


def test_a_model_without_a_chat_template_is_refused(stories15m):  # noqa: F811
    with pytest.raises(ValueError, match="chat template"):
        summarise(stories15m.model, stories15m.tokenizer, DOCUMENT)
