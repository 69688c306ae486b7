"""Training with one attention against another: first gradients, first losses, courses."""

import pandas as pd
import pytest
import torch
from torch import nn

from labsupport.training import DecoderConfig, TrainConfig, consistency
from labsupport.training.consistency import Course, gradient_errors, together, training_courses

SHAPE = DecoderConfig(vocab_size=32, width=32, layers=2, heads=2)
SETTINGS = TrainConfig(steps=6, learning_rate=1e-2)


def batches(seed):
    def stream(step):
        generator = torch.Generator().manual_seed(1000 * seed + step)
        tokens = torch.randint(32, (1, 200), generator=generator)
        return [{"tokens": tokens, "labels": tokens.roll(-1, dims=1)}]

    return stream


def test_the_first_gradients_obey_the_rule_and_a_wrong_one_is_found(monkeypatch):
    class Wrong(nn.Module):
        """Right in the oracle and the yardstick, a thousandth off in what is judged."""

        def __new__(cls, config, savings):
            model = real(config, savings)
            if savings.attention == "sdpa_flash":
                model.blocks[0].attention.query.weight.register_hook(lambda g: g * 1.001)
            return model

    errors = gradient_errors(SHAPE, batches(0), "flash_torch", device="cpu")
    assert len(errors) == len(dict(consistency.Decoder(SHAPE).named_parameters()))
    assert all(report.ok for report in errors.values()), errors
    real = consistency.Decoder
    monkeypatch.setattr(consistency, "Decoder", Wrong)
    errors = gradient_errors(SHAPE, batches(0), "sdpa_flash", device="cpu")
    assert [name for name, report in errors.items() if not report.ok] == [
        "blocks.0.attention.query.weight"
    ]


def test_equal_seeds_stay_together_and_other_seeds_do_not():
    courses = [Course("standard", 0), Course("sdpa_flash", 0), Course("standard", 1)]
    table = training_courses(SHAPE, batches, courses, SETTINGS, device="cpu", progress=False)
    assert together(table) < 1e-4
    losses = table.pivot_table(index="step", columns=["backend", "seed"], values="loss")
    assert (losses["standard", 0] - losses["standard", 1]).abs().min() > 1e-3
    assert set(table.step) == set(range(SETTINGS.steps))
    for part in (table.backend == "standard", (table.backend == "sdpa_flash") | (table.seed == 1)):
        with pytest.raises(ValueError, match="two attentions"):
            together(table[part])


def test_only_the_first_steps_are_compared():
    rows = [("a", 0, 0, 1.0), ("b", 0, 0, 1.5), ("a", 0, 30, 1.0), ("b", 0, 30, 9.0)]
    table = pd.DataFrame(rows, columns=["backend", "seed", "step", "loss"])
    assert together(table, steps=20) == 0.5
