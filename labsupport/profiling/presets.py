"""Shapes of attention worth measuring, from models that exist and uses that are common.

`labsupport bench --preset NAME` measures one; any option beside it replaces that part. On a CPU the
two long ones want a backend that stores no score matrix, and a minute.
"""

from __future__ import annotations

from typing import NamedTuple


class Preset(NamedTuple):
    """The shape of one attention layer's call, what it stands for, and where it comes from."""

    batch: int
    seqlen: int
    heads: int
    head_dim: int
    causal: bool
    about: str
    source: str
    kv_heads: int = 0  # as many as heads


GPT2 = 'Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.3'
GPT3 = 'Brown et al., "Language Models are Few-Shot Learners" (2020), table 2.1'
BERT = 'Devlin et al., "BERT" (2019), section 3'
LLAMA3 = 'heads as Llama 3 8B: Grattafiori et al., "The Llama 3 Herd of Models" (2024), table 3'

PRESETS = {
    "gpt2-small": Preset(8, 1024, 12, 64, True, "a decoder layer at its full context", GPT2),
    "gpt3": Preset(1, 2048, 96, 128, True, "GPT-3 175B at its full context: wide heads", GPT3),
    "bert-base": Preset(16, 512, 12, 64, False, "an encoder: each token sees all", BERT),
    "bert-large": Preset(16, 512, 16, 64, False, "an encoder with four heads more", BERT),
    "long-8k": Preset(1, 8192, 32, 128, True, "float32 scores would fill 8 GiB", LLAMA3, 8),
    "long-16k": Preset(1, 16384, 32, 128, True, "twice as long: four times the scores", LLAMA3, 8),
    "inference-batch": Preset(64, 512, 12, 64, True, "many short prompts in one batch", GPT2),
}


def describe_presets() -> str:
    """All presets as lines for a terminal."""
    lines = ["presets: batch x length x heads x head_dim"]
    for name, one in PRESETS.items():
        shared = f" ({one.kv_heads} of keys and values)" if one.kv_heads else ""
        mask = "causal" if one.causal else "not causal"
        shape = f"{one.batch} x {one.seqlen} x {one.heads}{shared} x {one.head_dim}, {mask}"
        lines += [f"{name:15}  {shape}: {one.about}", f"{'':15}  from {one.source}"]
    return "\n".join(lines)
