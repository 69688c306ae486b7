"""Gradients of a first step are judged; plain GPT-2 is measured beside the lab's decoder."""

import torch

from benchmarks import agreement
from benchmarks.training import PLAIN, PlainGPT2
from labsupport.training import Decoder, DecoderConfig, measure_step
from labsupport.training.measure import measure_training

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
