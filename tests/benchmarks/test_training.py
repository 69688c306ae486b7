"""The search for the longest sequence that trains; gradients judged; plain GPT-2 beside."""

from itertools import product

import pytest
import torch

from benchmarks import agreement
from benchmarks.__main__ import main
from benchmarks.training import PLAIN, PlainGPT2, last_that_runs
from labsupport.training import Decoder, DecoderConfig, measure_step
from labsupport.training.measure import measure_training


def test_the_search_finds_the_longest_that_runs_whatever_the_guess():
    for longest, guess, widen in product((1, 5, 16, 17, 100), (1, 4, 17, 60), (1, 16)):
        tried = []

        def attempt(units, longest=longest, tried=tried):
            tried.append(units)
            return {"status": "ok" if units <= longest else "out of memory", "seqlen": units}

        assert last_that_runs(attempt, guess, widen)["seqlen"] == longest
        assert len(tried) == len(set(tried))


def test_the_search_says_so_when_nothing_runs():
    assert last_that_runs(lambda units: {"status": "out of memory"}, 8) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_search_needs_a_gpu():
    with pytest.raises(RuntimeError, match="needs a GPU"):
        main(["training", "--longest", "--limit", "1GiB"])


def test_a_remedy_that_cannot_run_is_not_searched_again_and_again():
    tried = []

    def attempt(units):
        tried.append(units)
        return {"status": "unsupported", "reason": "because"}

    assert last_that_runs(attempt, 300)["reason"] == "because"
    assert len(tried) == 1


SHAPE = DecoderConfig(vocab_size=64, width=32, layers=2, heads=2)


def test_the_first_gradients_obey_the_rule_and_a_wrong_one_is_found(monkeypatch):
    def wrong(config, savings):
        """Right in the oracle and the yardstick, a thousandth off in what is judged."""
        model = Decoder(config, savings)
        if savings.attention == "sdpa_flash":
            model.blocks[0].attention.query.weight.register_hook(lambda g: g * 1.001)
        return model

    text = torch.randint(64, (1, 100), generator=torch.Generator().manual_seed(0))
    given = SHAPE, lambda step: [{"tokens": text, "labels": text.roll(-1, 1)}]
    cpu = torch.device("cpu")
    errors = agreement.gradient_errors(*given, "flash_torch", cpu)
    assert errors.keys() == dict(Decoder(SHAPE).named_parameters()).keys()
    assert all(report.ok for report in errors.values()), errors
    monkeypatch.setattr(agreement, "Decoder", wrong)
    errors = agreement.gradient_errors(*given, "sdpa_flash", cpu)
    faults = [name for name, report in errors.items() if not report.ok]
    assert faults == ["blocks.0.attention.query.weight"]


def test_transformers_own_gpt2_is_measured_beside_and_needs_more():
    options = {"device": "cpu", "max_seconds": 0.01, "progress": False}
    table = measure_training(SHAPE, [256], strategies=PLAIN[1:], make_model=PlainGPT2, **options)
    assert (table.status == "ok").all()
    sdpa, checkpointed = table.peak_memory_bytes
    assert sdpa > checkpointed > measure_step(SHAPE, seqlen=256).peak_bytes
    assert "predicted_bytes" not in table
