"""Texts as one batch of tokens, the choice of the next token, and columns of tokens as rows.

Texts of different lengths are padded on the left: so the last column holds every row's newest
token, and the next one is appended to all rows together. Two things then follow from the padding:

    attention mask    False where a row is padded: no query may see these keys
    positions         0, 1, 2 ... from each row's own first token on
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Batch:
    """Prompts as tokens, padded on the left.

    ids: (batch, width) int64.
    lengths: how many tokens of each row are real: at least 1.

    Raises:
        ValueError: no row, or ids and lengths that do not fit.
    """

    ids: Tensor
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        shape = tuple(self.ids.shape)
        integers = self.ids.dtype in (torch.int64, torch.int32)
        if not (integers and len(shape) == 2 and len(self.lengths) == shape[0] > 0):
            raise ValueError(
                f"ids must be (batch, width) int64, and lengths one number a row, but "
                f"{self.ids.dtype} {shape} and {self.lengths} were given"
            )
        if not all(1 <= length <= shape[1] for length in self.lengths):
            raise ValueError(f"lengths are from 1 to {shape[1]}, the width, not {self.lengths}")

    @property
    def width(self) -> int:
        """Length of the longest prompt."""
        return self.ids.shape[1]

    @property
    def starts(self) -> Tensor:
        """(batch,) int64: the column of each row's first real token."""
        return self.width - torch.tensor(self.lengths, device=self.ids.device)

    def mask(self, width: int) -> Tensor | None:
        """(batch, width) int64: 0 in the padded columns, else 1; None when no row is padded."""
        if min(self.lengths) == self.width:
            return None
        columns = torch.arange(width, device=self.ids.device)
        return (columns >= self.starts[:, None]).long()

    @property
    def positions(self) -> Tensor:
        """(batch, width) int64: 0 at each row's first real token, and in the padding."""
        columns = torch.arange(self.width, device=self.ids.device)
        return (columns - self.starts[:, None]).clamp(min=0)


@dataclass(frozen=True)
class Decoded:
    """New tokens by row, cut after the first end token, and times in seconds.

    step_s holds the decode steps one by one; it is empty for a loop that does not stop after each.
    """

    tokens: list[list[int]]
    prefill_s: float
    decode_s: float
    step_s: tuple[float, ...] = ()


class Sampler:
    """The choice of the next tokens: (batch, vocabulary) logits -> (batch,) int64.

    Nothing in it waits for the GPU, so that a CUDA graph can hold it.

    Args:
        device: of the logits.
        temperature: 0 takes the likeliest token; else logits are divided by it and sampled.
        top_k: sample among this many likeliest tokens.
        seed: of the random numbers, from the last `restart` on.

    Raises:
        ValueError: a temperature below 0 or not finite; top_k below 1, or without a temperature;
            a seed that is no whole number.
    """

    def __init__(
        self,
        device: torch.device,
        temperature: float = 0.0,
        top_k: int | None = None,
        seed: int = 0,
    ) -> None:
        if not isinstance(temperature, Real) or not 0 <= temperature < float("inf"):
            raise ValueError(
                f"temperature must be 0 (greedy) or more, and finite, got {temperature!r}"
            )
        if top_k is not None and (type(top_k) is not int or top_k < 1 or not temperature):
            raise ValueError(f"top_k={top_k!r} must be 1 or more, and needs a temperature above 0")
        if type(seed) is not int:
            raise ValueError(f"seed must be a whole number, got {seed!r}")
        self.temperature, self.top_k, self.seed = temperature, top_k, seed
        self.generator = torch.Generator(device).manual_seed(seed)

    def restart(self) -> None:
        """Begin the random numbers again."""
        self.generator.manual_seed(self.seed)

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the likeliest token, or a random one."""
        if not self.temperature:
            return logits.argmax(-1)
        tokens = None
        if self.top_k is not None:
            logits, tokens = logits.topk(min(self.top_k, logits.shape[-1]), sorted=False)
        logits = logits.float()
        # From the largest down: 0 divided by the lowest temperature stays 0.
        below = logits - logits.amax(-1, keepdim=True)
        p = (below / max(self.temperature, 1e-30)).softmax(-1)
        # The first of exponential waiting times with rates p has probability p.
        chosen = (p / torch.empty_like(p).exponential_(generator=self.generator)).argmax(-1)
        return chosen if tokens is None else tokens.gather(-1, chosen[:, None])[:, 0]


def batch_of(rows: Sequence[Sequence[int]], device: torch.device | str, pad: int = 0) -> Batch:
    """Make a `Batch` of rows of token ids; `pad` fills the left of the shorter ones.

    Raises:
        ValueError: no row, or an empty one.
    """
    if not rows or not all(isinstance(row, Sequence) and row for row in rows):
        raise ValueError("no prompt was given, or one without a single token: give rows of tokens")
    width = max(map(len, rows))
    padded = [[pad] * (width - len(row)) + list(row) for row in rows]
    return Batch(torch.tensor(padded, device=device), tuple(map(len, rows)))


def encode(
    tokenizer: PreTrainedTokenizerBase,
    prompts: str | Sequence[str],
    device: torch.device | str,
    *,
    chat: bool = False,
) -> Batch:
    """Make a `Batch` of one text or several.

    Args:
        chat: wrap each text as a user's message, by the tokenizer's chat template.

    An empty text becomes the tokenizer's begin-of-sequence token.

    Raises:
        ValueError: no prompt, or no tokenizer; a text without tokens; `chat` without a template.
    """
    if tokenizer is None:
        raise ValueError(
            "this model came without a tokenizer: pass one (--tokenizer FILE), or use "
            "prefill_and_decode with tokens"
        )
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if chat and not tokenizer.chat_template:
        raise ValueError(
            "chat=True (--chat) needs a tokenizer with a chat template: leave it out, or use an "
            "instruction-tuned model such as smollm2"
        )
    rows = []
    for text in texts:
        if chat:
            message = [{"role": "user", "content": text}]
            text = str(
                tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
            )
        # The chat template writes the special tokens itself.
        row = tokenizer(text, add_special_tokens=not chat)["input_ids"]
        if not row and (text or tokenizer.bos_token_id is None):
            raise ValueError(f"the tokenizer makes no token of the text {text[:40]!r}")
        rows.append(row or [tokenizer.bos_token_id])
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return batch_of(rows, device, 0 if pad is None else pad)


def check_model(model: PreTrainedModel) -> None:
    """Refuse a model that cannot continue a text.

    Raises:
        ValueError: no causal language model, or one in training mode with dropout.
    """
    able = getattr(model, "can_generate", lambda: False)()
    if not able or model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} does not continue texts: this needs a causal language model "
            "of Transformers, such as LlamaForCausalLM (and no encoder-decoder)"
        )
    rates = [getattr(m, name, 0) for m in model.modules() for name in ("p", "attention_dropout")]
    if model.training and any(isinstance(rate, float) and rate > 0 for rate in rates):
        raise ValueError("the model is in training mode, with dropout: call model.eval()")


def check_room(model: PreTrainedModel, batch: Batch, max_new_tokens: int) -> None:
    """Refuse more tokens than the model has positions.

    Raises:
        ValueError: max_new_tokens below 0; a token that has no row of the embedding; a prompt that,
            with the new tokens, is longer than the model's positions.
    """
    if type(max_new_tokens) is not int or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be 0 or more, and whole, got {max_new_tokens!r}")
    embedding: Any = model.get_input_embeddings()
    rows = embedding.weight.shape[0]
    for token in torch.stack(torch.aminmax(batch.ids)).tolist():
        if not 0 <= token < rows:
            raise ValueError(
                f"there is a token {token}, and the model's embedding has {rows} rows: "
                "this tokenizer does not belong to this model"
            )
    limit = getattr(model.config, "max_position_embeddings", None)
    longest = max(batch.lengths)
    if limit is not None and longest + max_new_tokens > limit:
        raise ValueError(
            f"{longest} tokens of text and {max_new_tokens} new ones are more than the model's "
            f"{limit} positions: shorten the text, or pass a smaller max_new_tokens"
        )


def check_logits(logits: Tensor) -> None:
    """Refuse logits that leave no choice: the largest of a row is NaN or infinite.

    Raises:
        ValueError: so it is.
    """
    if not logits.amax(-1).isfinite().all():
        raise ValueError(
            "the model's logits are NaN or infinite, and name no next token. To find the layer: "
            "`with PrecisionTracker(model) as tracker:` (labsupport.precision), then "
            "print(tracker.report())"
        )


def cut(tokens: Sequence[Tensor], batch: Batch, ends: Sequence[int]) -> list[list[int]]:
    """Turn columns of tokens into rows, each cut after its first end token."""
    if not tokens:
        return [[] for _ in batch.lengths]
    rows = torch.stack(list(tokens), dim=1).tolist()
    lengths = (
        next((n for n, token in enumerate(row, 1) if token in ends), len(row)) for row in rows
    )
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]
