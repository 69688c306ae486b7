"""A decoder in GPT-2's or Llama's shape, written to be read.

config   DecoderConfig: the shape, presets, the exact number of parameters; Savings: how to hold
         less memory for the same result
layers   the block: norms, attention, MLP
decoder  Decoder: tokens to hidden states, to logits or to a loss
convert  weights from and to Transformers' GPT2LMHeadModel and LlamaForCausalLM
"""

from labsupport.training.model.config import PRESETS, DecoderConfig, Savings
from labsupport.training.model.convert import from_transformers, to_transformers
from labsupport.training.model.decoder import Decoder

__all__ = [
    "PRESETS",
    "Decoder",
    "DecoderConfig",
    "Savings",
    "from_transformers",
    "to_transformers",
]
