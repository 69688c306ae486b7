"""`labsupport generate`, run as the program runs it."""

import json
import logging
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from labsupport.cli import app
from tests.models.tiny import TEXTS, lively, words


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved model with its tokenizer."""
    to = tmp_path_factory.mktemp("models") / "tiny"
    lively("llama").save_pretrained(to)
    words(bos_token="w01", eos_token="w59", pad_token="w00").save_pretrained(to)
    return to


@pytest.fixture
def program(folder):
    log = logging.getLogger("labsupport.models")
    before, level = list(log.handlers), log.level

    def call(*arguments, ok=True):
        options = ["generate", "--model", str(folder), "--device", "cpu"]
        done = CliRunner().invoke(app, [*options, *map(str, arguments)])
        if ok:
            assert done.exit_code == 0, (done.output, done.exception)
        return done

    yield call
    for handler in set(log.handlers) - set(before):
        log.removeHandler(handler)
    log.setLevel(level)


def test_it_prints_the_text_and_what_it_cost(program):
    done = program(TEXTS[1], "--max-new-tokens", 9)
    text, _, report = done.stdout.partition("\n\n")
    assert 1 <= len(text.split()) <= 9
    assert "prefill       2 tokens" in report
    assert "decode " in report
    assert "memory " in report
    assert "FlashAttention (sdpa_flash: " in report
    assert str(done.stderr).count("\n") == 1  # the model and its source, no more


def test_verbose_says_the_attention_of_each_layer_and_twice_the_time_of_each_step(program):
    done = program(TEXTS[1], "--max-new-tokens", 3, "-v", "--attention", "standard")
    assert "Using standard attention for layer 3 (standard)" in done.stderr
    assert "ms, tokens" not in done.stderr
    done = program(TEXTS[1], "--max-new-tokens", 3, "-vv", "--attention", "flash")
    assert "Using FlashAttention for layer 0 (sdpa_flash)" in done.stderr
    assert "prefill: " in done.stderr
    assert "step 2: " in done.stderr


def test_options_reach_the_generation(program):
    greedy = program(TEXTS[0], "--max-new-tokens", 8).stdout.splitlines()[0]
    for cache in ("static", "graphed"):
        again = program(TEXTS[0], "--max-new-tokens", 8, "--cache", cache)
        assert again.stdout.splitlines()[0] == greedy
    sampling = [TEXTS[0], "--max-new-tokens", 8, "--temperature", 2, "--batch", 2, "--seed"]
    one, same, other = (program(*sampling, seed).stdout.splitlines()[:2] for seed in (1, 1, 2))
    assert one == same != other
    assert one[0].startswith("[1] w")
    assert one[1].startswith("[2] w")
    assert one[0][4:] != one[1][4:]
    assert "Transformers" not in program(TEXTS[0], "--warm-up", "--dtype", "bfloat16").stdout


def test_the_prompt_may_lie_in_a_file(program, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(TEXTS[0], encoding="utf-8")
    typed = program(TEXTS[0], "--max-new-tokens", 5).stdout.splitlines()[0]
    options = ["--prompt-file", file, "--max-new-tokens", 5]
    assert program(*options).stdout.splitlines()[0] == typed
    for wrong in ([TEXTS[0], *options], []):
        assert "one of them" in str(program(*wrong, ok=False).exception)


def test_the_result_is_written_as_json(program, tmp_path):
    file = tmp_path / "result.json"
    program(TEXTS[1], "--max-new-tokens", 4, "--json", file)
    result = json.loads(file.read_text(encoding="utf-8"))
    assert len(result["token_ids"][0]) == result["new_tokens"] == 4
    assert result["prompt"] == TEXTS[1]
    assert result["attention"][0]["backend"] == "sdpa_flash"
    assert result["provenance"]["versions"]["torch"]
    other = tmp_path / "other.json"
    program(TEXTS[1], "--max-new-tokens", 1, "--json", other)
    assert json.loads(other.read_text(encoding="utf-8"))["decode_tokens_per_s"] is None


def strict(text):
    """The value of a JSON text that has no NaN, which Python's reader would let through."""

    def refuse(name):
        raise AssertionError(name)

    return json.loads(text, parse_constant=refuse)


def test_json_has_no_nan_in_its_table_and_the_text_no_rate_that_is_none(program, tmp_path):
    file = tmp_path / "result.json"
    done = program(TEXTS[1], "--max-new-tokens", 1, "--compare", "--json", file)
    assert [row["decode_tokens_per_s"] for row in strict(file.read_text())["table"]] == [None, None]
    assert "nan" not in done.stdout
    assert "decode" not in done.stdout
    assert "prefill" in done.stdout


def test_a_json_file_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    program, tmp_path
):
    (tmp_path / "there.json").write_text("mine")
    for name, message in {"there.json": "exists", "no/such.json": "there is no folder"}.items():
        done = program("w05", "--model", "no/such.bin", "--json", tmp_path / name, ok=False)
        assert message in str(done.exception)
        assert "such.bin" not in str(done.exception)
    assert (tmp_path / "there.json").read_text() == "mine"


def test_a_prompt_file_that_is_no_text_is_named(program, tmp_path):
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    done = program("--prompt-file", tmp_path / "picture.png", ok=False)
    assert "picture.png is no text in UTF-8" in str(done.exception)


def test_the_environment_variable_chooses_the_attention_of_the_program(project, folder):
    def run(choice):
        command = [sys.executable, "-m", "labsupport.cli", "generate", "w05", "--device", "cpu"]
        command += ["--model", str(folder), "--max-new-tokens", "2"]
        environment = {**os.environ, "LABSUPPORT_ATTENTION": choice}
        return subprocess.run(command, capture_output=True, text=True, cwd=project, env=environment)

    assert "attention  standard attention (standard: " in run("standard").stdout
    wrong = run("standrad")
    assert wrong.returncode == 1
    assert "unknown attention 'standrad' in the environment variable" in wrong.stderr


@pytest.mark.parametrize(
    ("variable", "options", "second"),
    [
        ("flash_torch", [], "flash_torch"),
        ("flash_torch", ["--attention", "sdpa_flash"], "sdpa_flash"),
        ("standard", [], "flash"),
    ],
)
def test_compare_sets_the_chosen_attention_against_the_standard_one(
    program, monkeypatch, variable, options, second
):
    monkeypatch.setenv("LABSUPPORT_ATTENTION", variable)
    done = program(TEXTS[1], "--max-new-tokens", 2, "--compare", "-v", *options)
    assert "standard (labsupport" in done.stdout
    assert f"\n{second} (" in done.stdout
    lines = [line for line in done.stderr.splitlines() if line.startswith("Using")]
    assert len(lines) == len(set(lines)) == 8  # four layers, two kinds


def test_compare_runs_both_kinds_and_says_how_far_they_agree(program, tmp_path):
    file = tmp_path / "result.json"
    done = program(TEXTS[1], "--max-new-tokens", 4, "--compare", "--json", file)
    assert "standard (" in done.stdout
    assert "flash (aten::" in done.stdout
    assert "the same 4 tokens" in done.stdout
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["agree"]
    assert [row["backend"] for row in result["table"]] == ["standard", "flash"]
    assert result["gap"] is None
    refused = program(TEXTS[1], "--compare", "--batch", 2, ok=False)
    assert "--compare takes one" in str(refused.exception)


def test_wrong_options_are_errors_that_say_what_is_known(program):
    assert "float32, bfloat16" in str(program("w05", "--dtype", "half", ok=False).exception)
    assert "dynamic, static" in str(program("w05", "--cache", "x", ok=False).exception)
    assert "unknown attention" in str(program("w05", "--attention", "x", ok=False).exception)
    assert "chat template" in str(program("w05", "--chat", ok=False).exception)
