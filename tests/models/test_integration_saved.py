"""A choice of attention, saved and shared."""

import subprocess
import sys

import torch
from transformers import LlamaForCausalLM

from labsupport.models.integration.select import set_attention
from tests.models.tiny import tiny, tokens


def test_a_whole_model_that_was_saved_runs_in_another_process_after_the_import(tmp_path):
    model = tiny("llama")
    set_attention(model, "flash")
    torch.save(model, tmp_path / "model.pt")
    code = (
        "import sys, torch\n"
        "{}\n"
        "model = torch.load(sys.argv[1], weights_only=False)\n"
        "print(float(model(torch.arange(9)[None]).logits.detach().sum()))"
    )

    def run(line):
        command = [sys.executable, "-c", code.format(line), str(tmp_path / "model.pt")]
        return subprocess.run(command, capture_output=True, text=True)

    done = run("import labsupport.models.integration")
    assert done.returncode == 0, done.stderr
    expected = float(model(torch.arange(9)[None]).logits.detach().sum())
    assert abs(float(done.stdout) - expected) < 1e-3
    assert "KeyError: '`lab_fa` is not a valid attention" in run("").stderr


def test_two_models_of_one_config_object_share_the_choice():
    one = tiny("llama")
    two = LlamaForCausalLM(one.config).eval()
    set_attention(one, "flash_torch")
    assert two.config._attn_implementation == "lab_fa_torch"
    set_attention(two, "standard")
    one(tokens(1, 4))
    assert one.config._attn_implementation == "lab_standard"
