"""Generate text with a Transformers model, in two phases that are timed apart.

    prefill   the whole prompt in one forward: its keys and values go into the cache, and the last
              position's logits give the first new token. Much arithmetic for each weight read.
    decode    one token at a time: each step reads all weights and the whole cache for one row of
              every matrix product. It waits for memory.

The loop is `prefill_and_decode`. It computes what `model.generate` computes; that one has many more
options, and does not say when the prefill ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from labsupport.models.generation.graphed import GraphedDecoder
from labsupport.models.generation.memory import MemorySampler
from labsupport.models.generation.prompts import (
    Batch,
    check_model,
    check_room,
    cut,
    encode,
    end_tokens,
)
from labsupport.models.generation.result import Decoded, Generation
from labsupport.profiling.timing import now

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.cache_utils import Cache

    from labsupport.models.integration.used import Used

Kind = Literal["dynamic", "static", "graphed"]
KINDS = ("dynamic", "static", "graphed")
Pick = Callable[[Tensor], Tensor]
# Called after each step: its number (0 is the prefill), the new tokens (batch,), its seconds.
OnStep = Callable[[int, Tensor, float], None]


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: str | Sequence[str],
    *,
    max_new_tokens: int = 64,
    cache: Kind = "dynamic",
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    stop_at_end: bool = True,
    chat: bool = False,
    on_step: OnStep | None = None,
) -> Generation:
    """Continue one text or several.

    Args:
        model: a causal language model of Transformers, in eval mode.
        prompts: one text or a list; different lengths are padded on the left.
        max_new_tokens: at most so many; 0 runs the prefill alone.
        cache: "dynamic" grows by one column a token; "static" has its full size from the start;
            "graphed" is the lab's fast loop (`GraphedDecoder`; greedy, Llama and GPT-2).
        temperature: 0 takes the likeliest token; else logits are divided by it and sampled.
        top_k: sample among so many likeliest tokens.
        seed: of the sampling; the same seed gives the same text on the same device.
        stop_at_end: a row stops at its end token; the loop, when all rows have.
        chat: wrap each prompt by the tokenizer's chat template.
        on_step: called after each step with its number, the tokens, its seconds.

    Raises:
        ValueError: options that make no sense; a prompt, or a tokenizer, that does not fit; a model
            in training mode, or one that does not continue texts.
    """
    _check_options(model, max_new_tokens, cache, temperature, top_k, on_step)
    batch = encode(tokenizer, prompts, model.device, chat=chat)
    check_room(model, batch, max_new_tokens)
    ends = end_tokens(model, tokenizer) if stop_at_end else ()
    ran_before = _attention_of(model)
    _read_weights(model)
    if cache == "graphed":
        length = batch.width + max_new_tokens
        decoder = GraphedDecoder(model, batch=len(batch.lengths), length=length)
        with MemorySampler(model.device) as memory:
            done = decoder.run(batch, max_new_tokens, ends=ends)
    else:
        with MemorySampler(model.device) as memory:
            done = prefill_and_decode(
                model,
                batch,
                max_new_tokens,
                cache=cache,
                pick=picker(temperature, top_k, seed, model.device),
                ends=ends,
                on_step=on_step,
            )
    return Generation(
        texts=[str(tokenizer.decode(row, skip_special_tokens=True)) for row in done.tokens],
        token_ids=done.tokens,
        prompt_tokens=batch.lengths,
        prefill_s=done.prefill_s,
        decode_s=done.decode_s,
        step_s=done.step_s,
        peak_bytes=memory.peak_bytes,
        mean_bytes=memory.mean_bytes,
        memory=memory.what,
        cache=cache,
        attention_name=str(model.config._attn_implementation),
        attention=_since(ran_before, _attention_of(model)),
    )


@torch.inference_mode()
def prefill_and_decode(
    model: PreTrainedModel,
    batch: Batch,
    max_new_tokens: int,
    *,
    cache: Literal["dynamic", "static"] = "dynamic",
    pick: Pick = lambda logits: logits.argmax(-1),
    ends: Sequence[int] = (),
    on_step: OnStep | None = None,
) -> Decoded:
    """The loop of `generate`: one prefill, then a forward for every further token.

    Args:
        batch: the prompts' tokens.
        pick: from logits (batch, vocabulary) to tokens (batch,).
        ends: tokens that end a row; none: all rows get `max_new_tokens`.
    """
    past = _new_cache(model, cache, batch.width + max_new_tokens)
    mask = batch.mask(batch.width + max_new_tokens)
    endings = torch.tensor(ends, device=model.device)

    def forward(ids: Tensor, positions: Tensor, seen: int) -> Tensor:
        # The last position's logits alone: those of a long prompt would be larger than the model.
        logits = model(
            ids,
            attention_mask=None if mask is None else mask[:, :seen],
            position_ids=positions,
            past_key_values=past,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]  # (batch, vocabulary)
        return pick(logits)  # (batch,)

    start = now(model.device)
    token = forward(batch.ids, batch.positions, batch.width)
    prefill_s = now(model.device) - start
    tokens, step_s = [token][:max_new_tokens], []
    position = batch.positions[:, -1:]
    ended = torch.isin(token, endings)
    if on_step and tokens:
        on_step(0, token, prefill_s)
    for step in range(1, max_new_tokens):
        if ends and ended.all():
            break
        start = now(model.device)
        token = forward(token[:, None], position + step, batch.width + step)
        step_s.append(now(model.device) - start)
        tokens.append(token)
        ended |= torch.isin(token, endings)
        if on_step:
            on_step(step, token, step_s[-1])
    return Decoded(cut(tokens, batch, ends), prefill_s, sum(step_s), tuple(step_s))


def picker(temperature: float, top_k: int | None, seed: int, device: torch.device) -> Pick:
    """How the next token is chosen from the logits: the likeliest, or sampled."""
    generator = torch.Generator(device).manual_seed(seed)

    def sample(logits: Tensor) -> Tensor:
        scores = logits.float() / temperature
        if top_k is not None:
            least = scores.topk(min(top_k, scores.shape[-1])).values[:, -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        return torch.multinomial(scores.softmax(-1), 1, generator=generator)[:, 0]

    return sample if temperature else lambda logits: logits.argmax(-1)


def _new_cache(model: PreTrainedModel, kind: str, length: int) -> Cache:
    from transformers import DynamicCache, StaticCache

    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=length)
    return DynamicCache(config=model.config)


def _attention_of(model: PreTrainedModel) -> tuple[Used, ...]:
    from labsupport.models.integration.used import attention_used

    return tuple(attention_used(model))


def _read_weights(model: PreTrainedModel) -> None:
    """Bring weights that are still in their file (memory-mapped) into the memory of a CPU.

    Otherwise the first prefill would wait for the disk, and the weights would count as its memory.
    """
    if model.device.type == "cpu":
        for parameter in model.parameters():
            parameter.detach().flatten()[::1024].sum()  # an element of every page is enough


def _since(before: Sequence[Used], after: Sequence[Used]) -> tuple[Used, ...]:
    """What ran between two readings of `attention_used`."""
    counted = {replace(use, calls=0): use.calls for use in before}
    new = (replace(use, calls=use.calls - counted.get(replace(use, calls=0), 0)) for use in after)
    return tuple(use for use in new if use.calls)


def _check_options(
    model: PreTrainedModel,
    max_new_tokens: int,
    cache: str,
    temperature: float,
    top_k: int | None,
    on_step: OnStep | None,
) -> None:
    check_model(model)
    if model.training:
        raise ValueError("the model is in training mode, and its dropout is active: model.eval()")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be 0 or more, got {max_new_tokens}")
    if cache not in KINDS:
        raise ValueError(f"cache must be one of {', '.join(KINDS)}, got {cache!r}")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0 (greedy) or more, and finite, got {temperature}")
    if top_k is not None and (top_k < 1 or not temperature):
        raise ValueError(f"top_k={top_k} must be 1 or more, and needs a temperature above 0")
    if cache == "graphed" and (temperature or on_step):
        raise ValueError(
            "the graphed loop is greedy, and does not stop after each step: "
            'use cache="dynamic" to sample or to watch the steps'
        )
