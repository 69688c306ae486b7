"""Shapes of attention worth measuring, each from a model that exists or a use that is common.

A preset gives batch, length, heads and head_dim, and whether the mask is causal; `labsupport bench
--preset NAME` measures one, and any option beside it replaces that part. GPUs take them as they
are. On a CPU the two long ones want a backend that stores no score matrix, and a minute.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """The shape of one attention layer's call.

    about: what it stands for, in a line.
    source: where its numbers come from.
    """

    batch: int
    seqlen: int
    heads: int
    head_dim: int
    causal: bool
    about: str
    source: str
    kv_heads: int = 0  # as many as heads

    def __str__(self) -> str:
        mask = "causal" if self.causal else "every token sees all"
        shared = f" ({self.kv_heads} of keys and values)" if self.kv_heads else ""
        return f"{self.batch} x {self.seqlen} x {self.heads}{shared} x {self.head_dim}, {mask}"


GPT2 = 'Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.3'
GPT3 = 'Brown et al., "Language Models are Few-Shot Learners" (2020), table 2.1'
BERT = 'Devlin et al., "BERT" (2019), section 3'
LLAMA3 = 'heads as Llama 3 8B: Grattafiori et al., "The Llama 3 Herd of Models" (2024), table 3'

PRESETS: dict[str, Preset] = {
    "gpt2-small": Preset(
        8, 1024, 12, 64, True, "a GPT-2 small layer at its full context: a decoder, causal", GPT2
    ),
    "gpt3": Preset(
        1, 2048, 96, 128, True, "a GPT-3 175B layer at its full context: many wide heads", GPT3
    ),
    "bert-base": Preset(
        16, 512, 12, 64, False, "a BERT base layer: an encoder, each token sees all", BERT
    ),
    "bert-large": Preset(16, 512, 16, 64, False, "a BERT large layer: four heads more", BERT),
    "long-8k": Preset(
        1,
        8192,
        32,
        128,
        True,
        "a long context: scores alone would fill 8 GiB in float32",
        LLAMA3,
        8,
    ),
    "long-16k": Preset(
        1, 16384, 32, 128, True, "twice that: four times the scores, twice the output", LLAMA3, 8
    ),
    "inference-batch": Preset(
        64, 512, 12, 64, True, "prompts of many users at once: many short sequences", GPT2
    ),
}


def preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        ValueError: there is none; the message lists those that exist.
    """
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}; there are: {', '.join(PRESETS)}")
    return PRESETS[name]


def describe_presets() -> str:
    """All presets as lines for a terminal."""
    width = max(map(len, PRESETS))
    lines = ["presets: batch x length x heads x head_dim"]
    for name, shape in PRESETS.items():
        lines += [
            f"{name.ljust(width)}  {shape}",
            f"{'':{width}}  {shape.about}",
            f"{'':{width}}  from {shape.source}",
        ]
    return "\n".join(lines)
