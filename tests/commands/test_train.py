"""`labsupport train`, run as the program runs it."""

import re
import sys

import pandas as pd
import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

from labsupport.cli import app
from labsupport.commands.train_options import out_of_memory, prepare, shape
from labsupport.training import Checkpoints
from labsupport.training.config import PRESETS
from labsupport.training.decoder import Decoder

SMALL = ["--layers", 1, "--width", 32, "--heads", 2, "--length", 256, "--data", "records"]


def program(*arguments, ok=True):
    command = ["train", *SMALL, "--device", "cpu", "--quiet", *arguments]
    done = CliRunner().invoke(app, list(map(str, command)))
    if ok:
        assert done.exit_code == 0, (done.output, done.exception)
    return done


def final_loss(done):
    return re.search(r"loss +([\d.]+) at step \d+, ([\d.]+) at step (\d+)", done.stdout).groups()


def test_it_prints_the_plan_and_the_result():
    done = program("--steps", 3, "--accumulation", 2)
    plan, _, result = done.stdout.partition("loss  ")
    assert "1 layers of 32, 2 heads" in plan
    assert "512 tokens a step (2 x 256), float32 on cpu" in plan
    assert "all activations are kept, MLP at once, loss at once; attention: auto" in plan
    assert " at step 0, " in result
    assert " at step 2" in result
    assert 4 < float(re.search(r"validation ([\d.]+) after step 2", result)[1]) < 7
    assert re.search(r"sample +['\"]The ", result)
    assert "tokens/s (median step)" in result
    assert "sdpa_flash ran (aten::_scaled_dot_product_flash_attention_for_cpu" in result
    assert done.stderr == ""


def test_a_run_in_a_folder_goes_on_where_it_stopped_and_another_is_refused(tmp_path):
    program("--steps", 3, "--folder", tmp_path / "whole")
    first = ["--steps", 2, "--decay-steps", 3, "--folder", tmp_path, "--checkpoint-every", 1]
    program(*first)
    assert len(pd.read_csv(tmp_path / "history.csv")) == 2
    program("--steps", 3, "--folder", tmp_path)
    table = pd.read_csv(tmp_path / "history.csv")
    whole = pd.read_csv(tmp_path / "whole" / "history.csv")
    assert list(table["step"]) == list(range(3))
    assert table[["loss", "grad_norm"]].equals(whole[["loss", "grad_norm"]])
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    assert len(Checkpoints(tmp_path).paths()) == 2
    complete = program("--steps", 3, "--folder", tmp_path)
    assert "none ran: the run in the folder is complete" in complete.stdout
    other = ["--steps", 3, "--folder", tmp_path, "--seed", 1, "--length", 512, "--kv-heads", 1]
    done = program(*other, ok=False)
    assert done.exit_code == 1
    for told in ("seed was 0 and is 1", "length was 256 and is 512",
                 "model.kv_heads was None and is 1", "--fresh"):  # fmt: skip
        assert told in str(done.exception)
    program(*other, "--fresh")


def test_ways_to_save_memory_do_not_change_the_course():
    run = ["--steps", 3, "--learning-rate", 3e-3]
    frugal = ["--checkpoint-layers", "--mlp-chunk", 64, "--loss-chunk", 100]
    done = program(*run, *frugal, "--attention", "standard")
    saved = "each block's input is kept, MLP in chunks of 64 tokens, loss in chunks of 100 tokens"
    assert saved in done.stdout
    assert "standard ran" in done.stdout
    assert float(final_loss(done)[1]) == pytest.approx(
        float(final_loss(program(*run))[1]), abs=2e-3
    )


def test_it_trains_in_float16_with_learned_or_other_rotary_positions():
    half = ["--dtype", "float16", "--residual", "bfloat16"]
    done = program("--steps", 2, *half, "--rope-base", 500_000, "--rope-scaling", 2)
    assert "float16 on cpu" in done.stdout
    assert "residual stream in bfloat16" in done.stdout
    assert "rotary positions, base 500,000, divided by 2" in done.stdout
    assert "learned positions" in program("--steps", 1, "--positions", "learned").stdout


def test_it_trains_under_a_policy_and_goes_on_under_the_same_one_only(tmp_path):
    run = ["--decay-steps", 4, "--learning-rate", 3e-3]
    policy = ["--folder", tmp_path, "--policy", "bfloat16"]
    done = program("--steps", 2, *run, *policy)
    assert "tokens a step, bfloat16 policy on cpu" in done.stdout
    resumed = program("--steps", 4, *run, *policy, "--checkpoint-layers", "--loss-chunk", 100)
    other = program("--steps", 4, *run, "--dtype", "bfloat16")
    assert float(final_loss(resumed)[1]) == pytest.approx(float(final_loss(other)[1]), abs=1e-2)
    refused = program("--steps", 4, *run, *policy[:2], ok=False)
    assert "policy was {" in str(refused.exception)
    assert "and is None" in str(refused.exception)


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
    remedies = re.findall(r"^  \d\. (--[\w-]+)", done.stderr, re.MULTILINE)
    assert remedies == ["--attention", "--checkpoint-layers", "--mlp-chunk", "--dtype",
                        "--residual", "--length"]  # fmt: skip


def test_remedies_that_are_in_use_are_not_named():
    defaults = {p.name: p.default for p in get_command(app).commands["train"].params}
    used = {"checkpoint_layers": True, "mlp_chunk": 512, "loss_chunk": 512}
    for how in ({"dtype": "bfloat16", "residual": "bfloat16"}, {"policy": "bfloat16"}):
        run = prepare(defaults | used | how, torch.device("cpu"))
        text = out_of_memory(RuntimeError("no memory left"), run)
        assert re.findall(r"--[\w-]+", text) == ["--length", "--preset"]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--preset", "huge"], "no preset 'huge'"),
        (["--family", "bert"], "unknown family 'bert'"),
        (["--data", "novels"], "unknown data 'novels'"),
        (["--tokens", "letters"], "unknown tokens 'letters'"),
        (["--length", "1 mile"], "no length"),
        (["--dtype", "int8"], "--dtype 'int8'"),
        (["--residual", "int8"], "--residual 'int8'"),
        (["--policy", "int8"], "--policy 'int8'"),
        (["--policy", "bfloat16", "--dtype", "bfloat16"], "--dtype and --policy both"),
        (["--attention", "flesh"], "flesh"),
        (["--steps", 0], "steps is 0"),
        (["--memory-limit", "much"], "'much' is not a size"),
        (["--fresh"], "--folder"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(wrong, told):
    done = program(*wrong, ok=False)
    assert done.exit_code == 1
    assert told in str(done.exception)


def test_a_run_that_diverges_keeps_the_curves_of_the_steps_before(tmp_path):
    arguments = ["--steps", 5, "--learning-rate", 1e30, "--warmup-steps", 0, "--folder", tmp_path]
    done = program(*arguments, ok=False)
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
    tokens = torch.arange(9)[None]
    assert Decoder(llama)(tokens).shape == (1, 9, 257)
