"""`labsupport generate`, run as the program runs it."""

import json
import logging

import pytest
from typer.testing import CliRunner

from labsupport.cli import app
from tests.models.test_generation import TEXTS, lively, words


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
    before = list(log.handlers)

    def call(*arguments, ok=True):
        options = ["generate", "--model", str(folder), "--device", "cpu"]
        done = CliRunner().invoke(app, [*options, *map(str, arguments)])
        if ok:
            assert done.exit_code == 0, (done.output, done.exception)
        return done

    yield call
    for handler in set(log.handlers) - set(before):
        log.removeHandler(handler)


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
    program(TEXTS[1], "--max-new-tokens", 1, "--json", file)
    assert json.loads(file.read_text(encoding="utf-8"))["decode_tokens_per_s"] is None


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
