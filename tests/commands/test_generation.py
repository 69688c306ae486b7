"""`labsupport generate`, run as the program runs it."""

import json
import logging
import re
import shlex
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


def strict(file):
    """The value of a JSON file that has no NaN, which Python's reader would let through."""
    return json.loads(file.read_text(encoding="utf-8"), parse_constant=pytest.fail)


def test_it_prints_the_text_and_what_it_cost_and_writes_json(program, tmp_path):
    done = program(TEXTS[1], "--max-new-tokens", 9, "--json", tmp_path / "result.json")
    text, _, report = done.stdout.partition("\n\n")
    assert 1 <= len(text.split()) <= 9
    parts = (
        "prefill       2 tokens",
        "decode ",
        " steps/s",
        "memory ",
        "FlashAttention (sdpa_flash: ",
    )
    assert all(part in report for part in parts)
    assert str(done.stderr).count("\n") == 1  # the model and its source, no more
    result = strict(tmp_path / "result.json")
    assert len(result["token_ids"][0]) == result["new_tokens"]
    assert result["prompt"] == TEXTS[1]
    assert result["attention"][0]["backend"] == "sdpa_flash"
    assert result["provenance"]["versions"]["torch"]


def test_verbose_says_the_attention_of_each_layer_and_twice_the_time_of_each_step(program):
    done = program(TEXTS[1], "--max-new-tokens", 3, "-v", "--attention", "standard")
    lines = [line for line in done.stderr.splitlines() if line.startswith("Using")]
    assert lines == ["Using standard attention for layers 0-3 (standard)"]
    assert "ms, tokens" not in done.stderr
    done = program(TEXTS[1], "--max-new-tokens", 3, "-vv", "--attention", "flash")
    for part in ("Using FlashAttention for layers 0-3 (sdpa_flash)", "prefill: ", "step 2: "):
        assert part in done.stderr


@pytest.mark.slow
def test_a_terminal_shows_a_bar_and_a_file_none(folder):
    words = ["generate", TEXTS[1], "--model", folder, "--max-new-tokens=3", "--device=cpu"]
    command = shlex.join([sys.executable, "-m", "labsupport.cli", *map(str, words)])
    code = f"import pty; pty.spawn(['sh', '-c', 'stty rows 24 cols 80; ' + {command!r}])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "0/3 [" in shown.stdout
    in_a_file = subprocess.run(shlex.split(command), capture_output=True, text=True)
    assert "0/3 [" not in in_a_file.stderr


def test_a_text_is_continued_unless_it_is_wrapped_or_asks_about_a_document(folder, tmp_path):
    """With a chat template, whose words are counted."""
    chatty = tmp_path / "chatty"
    lively("llama").save_pretrained(chatty)
    tokenizer = words(bos_token="w01", eos_token="w59", pad_token="w00")
    tokenizer.chat_template = "w07 w08 {{ messages[0]['content'] }} w09"
    tokenizer.save_pretrained(chatty)
    (tmp_path / "document.txt").write_text("w05 w06")

    def tokens(*more):
        command = ["generate", "w03 w04", "--model", str(chatty), "--device=cpu", *map(str, more)]
        done = CliRunner().invoke(app, [*command, "--max-new-tokens=1"])
        assert done.exit_code == 0, done.exception
        return int(re.search(r"prefill +(\d+) tokens", done.stdout)[1])

    document = ["--document", tmp_path / "document.txt"]
    plain = tokens()
    assert [tokens("--chat"), tokens(*document), tokens(*document, "--no-chat")] == [
        plain + 3, plain + 5, plain + 2,
    ]  # fmt: skip


def test_options_reach_the_generation(program, tmp_path, monkeypatch):
    short = ["--max-new-tokens", 4]
    greedy = program(TEXTS[0], *short).stdout.splitlines()[0]
    done = program(TEXTS[0], *short, "--cache", "static")
    assert done.stdout.splitlines()[0] == greedy
    assert "\ncache    static\n" in done.stdout
    assert "hint: " not in done.stderr  # on a CPU
    sampling = [TEXTS[0], *short, "--temperature", 2, "--batch", 2, "--seed"]
    one, same, other = (program(*sampling, seed).stdout.splitlines()[:2] for seed in (1, 1, 2))
    assert one == same != other
    assert one[0].startswith("[1] w")
    assert one[1].startswith("[2] w")
    assert one[0][4:] != one[1][4:]
    (tmp_path / "prompt.txt").write_text(TEXTS[0], encoding="utf-8")
    monkeypatch.setenv("LABSUPPORT_ATTENTION", "standard")
    done = program("--prompt-file", tmp_path / "prompt.txt", *short, "--warm-up")
    assert done.stdout.splitlines()[0] == greedy
    assert "attention  standard attention (standard: " in done.stdout


def test_a_document_comes_before_the_question(program, tmp_path):
    document = tmp_path / "document.txt"
    document.write_text(f"{TEXTS[0]}\n", encoding="utf-8")
    asked = [TEXTS[1], "--document", document, "--json", tmp_path / "asked.json"]
    program(*asked, "--max-new-tokens", 2)
    program("--document", document, "--max-new-tokens", 2, "--json", tmp_path / "summary.json")
    prompts = [strict(tmp_path / f"{name}.json")["prompt"] for name in ("asked", "summary")]
    assert prompts == [
        f"{TEXTS[0]}\n\n{TEXTS[1]}",
        f"{TEXTS[0]}\n\nSummarise the text above in three sentences.",
    ]


def test_a_tokenizer_from_elsewhere_serves_a_model_without_one(program, folder, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(folder / name)
    short = [TEXTS[0], "--max-new-tokens", 4]
    bare = [*short, "--model", tmp_path]
    assert "--tokenizer FILE" in str(program(*bare, ok=False).exception)
    greedy = program(*short).stdout.splitlines()[0]
    for tokenizer in (folder, folder / "tokenizer.json"):
        assert program(*bare, "--tokenizer", tokenizer).stdout.splitlines()[0] == greedy


def test_wrong_options_are_errors_before_the_model_is_loaded(program, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.json").write_text("mine")
    for options, message in (
        ([], "one of them"),
        (["w05", "--prompt-file", "prompt.txt"], "one of them"),
        (["w05", "--dtype", "half"], "float32, bfloat16"),
        (["w05", "--cache", "x"], "dynamic, static"),
        (["w05", "--attention", "x"], "unknown attention"),
        (["w05", "--chat"], "chat template"),
        (["w05", "--compare", "--batch", 2], "--compare takes one"),
        (["w05", "--model", "no/such.bin", "--json", "there.json"], "there.json"),
        (["w05", "--model", "no/such.bin", "--json", "no/such.json"], "no/such.json"),
    ):
        assert message in str(program(*options, ok=False).exception)
    assert (tmp_path / "there.json").read_text() == "mine"


@pytest.mark.parametrize(
    ("variable", "options", "second", "tokens"),
    [("flash_torch", ["--attention", "sdpa_flash"], "sdpa_flash", 1), ("standard", [], "flash", 3)],
)
def test_compare_sets_the_chosen_attention_against_the_standard_one_and_writes_no_nan(
    program, monkeypatch, tmp_path, variable, options, second, tokens
):
    monkeypatch.setenv("LABSUPPORT_ATTENTION", variable)
    file = tmp_path / "result.json"
    compare = ["--max-new-tokens", tokens, "--compare", "-v", "--json", file]
    done = program(TEXTS[1], *compare, *options)
    lines = [line for line in done.stderr.splitlines() if line.startswith("Using")]
    assert [line.split("for ")[1][:10] for line in lines] == ["layers 0-3"] * 2  # two kinds
    assert f"the same {tokens} tokens" in done.stdout
    assert "nan" not in done.stdout
    assert ("decode" in done.stdout) == (tokens > 1)
    result = strict(file)
    assert result["agree"]
    assert [row["backend"] for row in result["table"]] == ["standard", second]
    rates = [row["decode_tokens_per_s"] for row in result["table"]]
    assert [rate is None for rate in rates] == [tokens == 1] * 2
