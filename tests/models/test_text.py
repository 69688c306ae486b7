"""Long texts that every Python has, and their tokens."""

import sys

import pytest
import torch

from labsupport.models.sources.text import python_topics, source_text, tokens_of


def test_the_topics_of_help_are_many_and_long():
    topics = python_topics()
    assert list(topics) == sorted(topics)
    assert "debugging assertions" in topics["assert"]
    assert sum(map(len, topics.values())) > 300_000


def test_a_module_s_source_is_read_and_the_module_is_not_imported():
    assert "class JSONDecoder" in source_text("json.decoder")
    sys.modules.pop("antigravity", None)
    assert "webbrowser" in source_text("antigravity")
    assert "antigravity" not in sys.modules
    for module in ("no_such_module", "no_such.module", "sys", "", "argparse.x"):
        with pytest.raises(ValueError, match="try argparse"):
            source_text(module)


def test_tokens_are_the_beginning_of_the_text(gpt2_tokenizer, recwarn, capfd):
    text = source_text("argparse")
    ids = tokens_of(gpt2_tokenizer, text, 2000)
    assert (ids.shape, ids.dtype) == ((1, 2000), torch.int64)
    assert text.startswith(gpt2_tokenizer.decode(ids[0]).rstrip("\N{REPLACEMENT CHARACTER}"))
    assert not recwarn.list
    assert capfd.readouterr().err == ""


def test_a_text_that_is_too_short_says_how_long_it_is(gpt2_tokenizer):
    with pytest.raises(ValueError, match=r"has 2 tokens \(11 characters\), not 3.*python_topics"):
        tokens_of(gpt2_tokenizer, "Hello world", 3)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        tokens_of(gpt2_tokenizer, "Hello world", 0)
