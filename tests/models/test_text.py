"""Long texts that every Python has, and their tokens."""

import sys

import pytest
import torch

from labsupport.models.sources.text import python_topics, source_text, tokens_of


def test_the_topics_of_help_are_many_and_long():
    topics = python_topics()
    assert list(topics) == sorted(topics)
    assert "assert" in topics
    assert "debugging assertions" in topics["assert"]
    assert sum(map(len, topics.values())) > 300_000


def test_a_module_s_source_is_read_and_the_module_is_not_imported():
    assert "class ArgumentParser" in source_text("argparse")
    assert "class JSONDecoder" in source_text("json.decoder")
    sys.modules.pop("antigravity", None)
    assert "webbrowser" in source_text("antigravity")
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("module", ["no_such_module", "no_such.module", "sys", "", "argparse.x"])
def test_what_has_no_python_source_is_refused_with_a_way_out(module):
    with pytest.raises(ValueError, match="try argparse"):
        source_text(module)


@pytest.mark.parametrize("which", ["gpt2_tokenizer", "stories_tokenizer"])
def test_tokens_are_the_beginning_of_the_text(which, request, recwarn, capfd):
    tokenizer = request.getfixturevalue(which)
    text = source_text("argparse")
    ids = tokens_of(tokenizer, text, 2000)
    assert (ids.shape, ids.dtype) == ((1, 2000), torch.int64)
    assert text.startswith(tokenizer.decode(ids[0]).rstrip("\N{REPLACEMENT CHARACTER}"))
    assert not recwarn.list
    assert capfd.readouterr().err == ""


@pytest.fixture
def stories_tokenizer(stories15m):
    return stories15m.tokenizer


def test_a_text_that_is_too_short_says_how_long_it_is(gpt2_tokenizer):
    assert tokens_of(gpt2_tokenizer, "Hello world", 2).tolist() == [[15496, 995]]
    with pytest.raises(ValueError, match=r"has 2 tokens \(11 characters\), not 3.*python_topics"):
        tokens_of(gpt2_tokenizer, "Hello world", 3)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        tokens_of(gpt2_tokenizer, "Hello world", 0)
