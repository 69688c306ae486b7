"""`labsupport train`, run as the program runs it."""

import os
import re
import shutil
import signal
import sys
import time
from dataclasses import fields
from functools import partial
from threading import Thread

import pandas as pd
import pytest
import torch

from labsupport.commands.train import TrainOptions, describe, prepare
from labsupport.training import Checkpoints
from labsupport.training.checkpoint import step_of
from tests.commands.program import program

SMALL = ["--preset", "1x32", "--length", 128, "--data", "records"]


train = partial(program, "train", *SMALL, "--device", "cpu")


def prepared(**options):
    return prepare(TrainOptions(**options), torch.device("cpu"))


def final_loss(done):
    return float(re.search(r"([\d.]+) at step \d+\n", done.stdout)[1])


def test_it_prints_the_plan_and_the_result():
    done = train("--steps", 3, "--accumulation", 2, "--batch", 3)
    plan, result = done.stdout.split(" at step 0, ")
    assert "1 layers of 32, 1 heads" in plan
    assert "6 x 128 tokens a step, float32 on cpu\nsaves memory: no; attention: auto\n" in plan
    for part in (" at step 2", "tokens/s (median step)",
                 "sdpa_flash ran (aten::_scaled_dot_product_flash_attention_for_cpu"):  # fmt: skip
        assert part in result
    assert 4 < float(re.search(r"validation ([\d.]+) after step 2", result)[1]) < 7
    assert re.search(r"sample +['\"]The ", result)
    assert done.stderr == ""
    frugal = "checkpoint,mlp=64,loss=100,residual,heads,offload"
    train("--steps", 1, "--dtype", "float16", "--save-memory", frugal)


def test_the_command_has_eighteen_options_each_with_its_help():
    help_text = program("train", "--help", env={"COLUMNS": "200"}).stdout
    options = set(re.findall(r"^\W*(--[a-z-]+)", help_text, re.M)) - {"--help"}
    named = {"--" + field.name.replace("_", "-") for field in fields(TrainOptions)}
    assert options == named
    assert len(options) == 18
    assert "Resumes a run there" in help_text


def test_options_that_save_memory_have_names_and_numbers():
    savings = prepared(save_memory="checkpoint,mlp=64,loss,residual", attention="standard").savings
    assert (savings.checkpoint, savings.mlp_chunk, savings.loss_chunk) == (True, 64, 1024)
    assert (savings.residual, savings.head_chunk) == (torch.bfloat16, None)
    assert savings.attention == "standard"
    assert prepared().savings == type(savings)()


def test_the_plan_says_how_ranks_share_the_work():
    for parallel, words in (("fsdp", "sequences, and the model, shared by 2 ranks"),
                            ("ring", "each sequence shared by 2 ranks")):  # fmt: skip
        options = TrainOptions(parallel=parallel, join_documents=True)
        device = torch.device("cpu")
        assert words in describe(options, prepare(options, device), device, 2)


def test_joined_documents_see_one_another_and_are_another_run():
    run = prepared(join_documents=True, length="64", batch=2, accumulation=4)
    (first, second, *_) = run.open_batches("all")(0)
    assert first.keys() == second.keys() == {"tokens", "labels"}
    assert first["tokens"].shape == (2, 64)
    assert run.run_config["joined"]


def test_documents_of_a_micro_batch_stay_apart():
    options = {"length": "64", "accumulation": 2}
    (joined, _) = prepared(batch=2, **options).open_batches("all")(0)
    (one, two, *_) = prepared(length="64", accumulation=4).open_batches("all")(0)
    assert torch.equal(joined["tokens"], torch.cat([one["tokens"], two["tokens"]], 1))
    ends = torch.cat([one["cu_seqlens"], two["cu_seqlens"][1:] + 64])
    assert torch.equal(joined["cu_seqlens"], ends)
    assert torch.equal(joined["positions"], torch.cat([one["positions"], two["positions"]], 1))


def test_a_run_in_a_folder_goes_on_where_it_stopped_and_another_is_refused(tmp_path):
    run = ["--steps", 3, "--folder", tmp_path]
    train(*run)
    shutil.rmtree(tmp_path / "step-000003")
    train(*run)
    assert list(pd.read_csv(tmp_path / "history.csv")["step"]) == [0, 1, 2]
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    assert [step_of(path) for path in Checkpoints(tmp_path).paths()] == [3, 2]
    complete = train(*run)
    assert "none ran: the run in the folder is complete" in complete.stdout
    done = train(*run, "--seed", 1, "--length", 64, "--preset", "2x32", "--batch", 2, ok=False)
    for told in ("seed was 0 and is 1", "length was 128 and is 64", "sequences was 1 and is 2",
                 "model.layers was 1 and is 2", "another folder"):  # fmt: skip
        assert told in str(done.exception)


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
    command = ["--attention", "standard", "--limit", "3GiB", "--length", "32K"]
    done = python(
        *("-c", "from labsupport.cli import main; main()", "train", "--steps", 1),
        *("--data", "records", "--device", "cpu", "--save-memory", "loss=1024", *command),
    )
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert re.match(r"labsupport: out of memory: .*limit of 3\.0 GiB", lines[0]), done.stderr
    assert lines[1] == "What helps, in this order:"
    assert lines[2].startswith("  1. --attention auto")
    assert lines[3].startswith("  2. --save-memory checkpoint")


def test_a_run_that_diverges_keeps_the_curves_of_the_steps_before(tmp_path):
    done = train("--steps", 5, "--learning-rate", 1e30, "--folder", tmp_path, ok=False)
    assert "step 1, micro-batch 0" in str(done.exception)
    assert len(pd.read_csv(tmp_path / "history.csv")) == 1
    assert (tmp_path / "loss.png").exists()
