"""`labsupport train`, run as the program runs it."""

import os
import re
import signal
import sys
import time
from functools import partial
from threading import Thread

import pandas as pd
import pytest
import torch
from typer.main import get_command

from labsupport.cli import app
from labsupport.commands.train_options import plan, prepare, shape
from labsupport.training import Checkpoints
from labsupport.training.checkpoint import step_of
from labsupport.training.config import PRESETS
from tests.commands.program import program

SMALL = ["--layers", 1, "--width", 32, "--heads", 2, "--length", 128, "--data", "records"]


train = partial(program, "train", *SMALL, "--device", "cpu", "--quiet")


def prepared(**options):
    defaults = {p.name: p.default for p in get_command(app).commands["train"].params}
    return prepare(defaults | options, torch.device("cpu"))


def final_loss(done):
    return float(re.search(r"([\d.]+) at step \d+\n", done.stdout)[1])


def test_it_prints_the_plan_and_the_result():
    done = train("--steps", 3, "--accumulation", 2)
    plan, result = done.stdout.split(" at step 0, ")
    assert "1 layers of 32, 2 heads" in plan
    assert "256 tokens a step (2 x 128), float32 on cpu\n" in plan
    for part in (" at step 2", "tokens/s (median step)",
                 "sdpa_flash ran (aten::_scaled_dot_product_flash_attention_for_cpu"):  # fmt: skip
        assert part in result
    assert 4 < float(re.search(r"validation ([\d.]+) after step 2", result)[1]) < 7
    assert re.search(r"sample +['\"]The ", result)
    assert done.stderr == ""
    train("--steps", 1, "--dtype", "float16", "--residual", "bfloat16")


def test_the_plan_says_what_was_chosen():
    frugal = {"checkpoint_layers": True, "mlp_chunk": 64, "loss_chunk": 100}
    for options, words in (
        ({}, "all activations are stored, MLP at once, loss at once; attention: auto"),
        (frugal, "each block's input is stored, MLP in chunks of 64 tokens, loss in chunks of 100"),
        ({"attention": "standard"}, "attention: standard"),
        ({"dtype": "float16", "residual": "bfloat16"}, "float16 on cpu\n"),
        ({"residual": "bfloat16"}, "residual stream in bfloat16"),
        ({"rope_base": 5e5, "rope_scaling": 2.0}, "positions, base 500,000, divided by 2)"),
        ({"positions": "learned"}, "learned positions)"),
        ({"policy": "bfloat16"}, "tokens a step, bfloat16 policy on cpu"),
    ):
        assert words in plan(prepared(**options), torch.device("cpu"))


def test_joined_documents_see_one_another_and_are_another_run():
    run = prepared(join_documents=True, length="64", steps=1)
    assert [batch.keys() for batch in run.open_batches("all")(0)] == [{"tokens", "labels"}]
    assert run.run_config["joined"]


def test_a_run_in_a_folder_goes_on_where_it_stopped_and_another_is_refused(tmp_path):
    run = ["--folder", tmp_path, "--policy", "bfloat16"]
    train("--steps", 2, "--decay-steps", 3, "--checkpoint-every", 1, *run)
    train("--steps", 3, *run)
    assert list(pd.read_csv(tmp_path / "history.csv")["step"]) == [0, 1, 2]
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    assert len(Checkpoints(tmp_path).paths()) == 2
    complete = train("--steps", 3, *run)
    assert "none ran: the run in the folder is complete" in complete.stdout
    other = ["--steps", 3, *run[:2], "--seed", 1, "--length", 64, "--kv-heads", 1]
    done = train(*other, ok=False)
    for told in ("seed was 0 and is 1", "length was 128 and is 64", "policy was {",
                 "model.kv_heads was None and is 1", "--fresh"):  # fmt: skip
        assert told in str(done.exception)
    train(*other, "--fresh")


def test_sigterm_ends_the_run_with_a_checkpoint_and_status_0(tmp_path):
    def send_when_it_trains():
        while not (tmp_path / ".lock").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    Thread(target=send_when_it_trains).start()
    done = train("--steps", 10**6, "--folder", tmp_path)
    assert signal.getsignal(signal.SIGTERM) == before
    steps = int(re.search(r"stopped by SIGTERM after (\d+) of 1,000,000 steps", done.stderr)[1])
    assert len(pd.read_csv(tmp_path / "history.csv")) == steps
    assert step_of(Checkpoints(tmp_path).paths()[0]) == steps


def test_it_trains_on_own_texts_and_refuses_to_go_on_with_changed_ones(tmp_path):
    own = tmp_path / "own.txt"
    own.write_text("abc " * 100, encoding="utf-8")
    run = ["--data", own, "--folder", tmp_path / "run", "--steps", 20, "--learning-rate", 1e-2]
    assert final_loss(train(*run)) < 3
    own.write_text("abx " * 100, encoding="utf-8")
    assert "data was '1 files with SHA-256 " in str(train(*run, ok=False).exception)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory_limit is Linux's")
def test_out_of_memory_is_one_message_with_the_remedies_in_order(python):
    command = ["--attention", "standard", "--memory-limit", "3GiB", "--length", "32K"]
    done = python(
        *("-c", "from labsupport.cli import main; main()", "train", "--steps", 1, "--quiet"),
        *("--data", "records", "--device", "cpu", "--loss-chunk", 1024, *command),
    )
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert re.match(r"labsupport: out of memory: .*limit of 3\.0 GiB", lines[0]), done.stderr
    assert lines[1] == "What helps, in this order:"
    assert lines[2].startswith("  1. --attention auto")


def test_a_run_that_diverges_keeps_the_curves_of_the_steps_before(tmp_path):
    arguments = ["--steps", 5, "--learning-rate", 1e30, "--warmup-steps", 0, "--folder", tmp_path]
    done = train(*arguments, ok=False)
    assert "step 1, micro-batch 0" in str(done.exception)
    assert len(pd.read_csv(tmp_path / "history.csv")) == 1
    assert (tmp_path / "loss.png").exists()


def test_a_family_is_its_norm_its_mlp_and_its_biases():
    llama = shape("tiny", "llama", 257, heads=4, kv_heads=2)
    assert (llama.norm, llama.mlp, llama.bias, llama.mlp_width) == ("rms", "swiglu", False, 384)
    gpt2 = shape("llama-110m", "gpt2", 257)
    assert (gpt2.norm, gpt2.mlp, gpt2.bias, gpt2.inner_width) == ("layer", "gelu", True, 4 * 768)
    assert shape("llama-110m", None, 32_000) == PRESETS["llama-110m"]
    assert shape("llama-110m", None, 9, width=384, heads=6).mlp_width == 1024
