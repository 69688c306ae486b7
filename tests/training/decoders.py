"""Small decoders, and how two training steps of them are compared."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from labsupport.training import Decoder, DecoderConfig, MemoryOptions
from tests.models.tiny import VOCABULARY, tokens

SMALL = DecoderConfig(vocab_size=VOCABULARY, width=32, layers=2, heads=4, max_positions=64)
SHAPES = {
    "gpt2": replace(SMALL, positions="learned"),
    "gpt2 with rotary positions": SMALL,
    "llama": replace(
        SMALL, kv_heads=2, mlp_width=48, norm="rms", mlp="swiglu", bias=False, tied=False
    ),
    "llama, interleaved": replace(
        SMALL, kv_heads=1, mlp_width=48, norm="rms", mlp="swiglu", bias=False, rope_interleaved=True
    ),
}
ROTARY = [name for name, config in SHAPES.items() if config.positions == "rotary"]
of_each_shape = pytest.mark.parametrize("shape", SHAPES)


@cache
def decoder_of(config):
    torch.manual_seed(0)
    decoder = Decoder(config)
    # Weights of 0.02 give nearly uniform attention, which hides wrong positions and masks.
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
            elif parameter is not decoder.norm.weight:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return decoder


def model(shape, savings=None):
    """The decoder of a shape, the same each time, with these savings and without gradients."""
    decoder = decoder_of(SHAPES[shape])
    decoder.savings = savings or MemoryOptions()
    decoder.zero_grad(set_to_none=True)
    return decoder


def shifted(batch, length):
    """Tokens, and for each of them the one that follows, the way a Decoder wants its labels."""
    row = tokens(batch, length + 1)
    return row[:, :-1], row[:, 1:]


def loss_and_gradients(decoder, *args, **options):
    """Return the result of `decoder(...)` and the gradient of each parameter by its name."""
    decoder.zero_grad(set_to_none=True)
    loss = decoder(*args, **options)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in decoder.named_parameters()}


def assert_same_step(got, expected, bound=1e-5):
    """Losses, and the gradient of each parameter, agree to `bound` of the expected one's norm."""
    torch.testing.assert_close(got[0], expected[0], rtol=bound, atol=0)
    assert got[1].keys() == expected[1].keys()
    largest = max(gradient.norm() for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        # Of a key's bias nothing is left but rounding: softmax does not see a constant.
        allowed = bound * max(gradient.norm(), 1e-2 * largest)
        assert (got[1][name] - gradient).norm() <= allowed, name
