"""Generate text with a Transformers model, in two phases that are timed apart.

    prefill   the whole prompt in one forward: its keys and values go into the cache, and the last
              position's logits give the first new token. Much arithmetic for each weight read.
    decode    one token at a time: each step reads all weights and the whole cache for one row of
              every matrix product. It waits for memory.

The loop is `prefill_and_decode`. It computes what `model.generate` computes; that one has many more
options, and does not say when the prefill ends.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from labsupport.attention.kernels import mode
from labsupport.models.generation.cuda_graph import GraphedDecoder
from labsupport.models.generation.memory_sampler import MemorySampler
from labsupport.models.generation.prompts import (
    Batch,
    Decoded,
    Sampler,
    check_logits,
    check_model,
    check_room,
    cut,
    encode,
)
from labsupport.models.generation.steps import LlamaStep
from labsupport.models.integration.trace import Used, UsedTable, attention_used
from labsupport.profiling.timing import now
from labsupport.profiling.units import format_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Kind = Literal["dynamic", "static", "graphed"]
KINDS = ("dynamic", "static", "graphed")
# Called after each step: its number (0 is the prefill), the new tokens (batch,), its seconds.
OnStep = Callable[[int, Tensor, float], None]


@dataclass(frozen=True)
class Generation:
    """Generated texts, and what they cost.

    texts: the new text of each prompt, without special tokens.
    token_ids: its tokens, the end token included.
    prompt_tokens: tokens of each prompt, padding not counted.
    prefill_s, decode_s: seconds; the first new token belongs to the prefill. In a process's first
        call, libraries still initialise.
    step_s: seconds of each decode step (empty with the graphed loop, which does not stop for it).
    peak_bytes, mean_bytes: memory beyond what there was at the start (the weights), cache included;
        `memory` says how it was counted.
    attention_name: the model's attention, by Transformers' name for it.
    attention: of labsupport's, what ran in each layer of this call, as `attention_used` gives it;
        empty when the model uses another. The graphed loop's decode steps are not in it.
    """

    texts: list[str]
    token_ids: list[list[int]]
    prompt_tokens: tuple[int, ...]
    prefill_s: float
    decode_s: float
    step_s: tuple[float, ...]
    peak_bytes: int
    mean_bytes: int
    memory: str
    cache: str
    attention_name: str
    attention: UsedTable = field(default_factory=UsedTable)

    @property
    def text(self) -> str:
        """The first prompt's new text."""
        return self.texts[0]

    @property
    def new_tokens(self) -> int:
        """New tokens of all rows together."""
        return sum(map(len, self.token_ids))

    @property
    def decoded_tokens(self) -> int:
        """New tokens of all rows, without each row's first, which is the prefill's."""
        return sum(max(0, len(row) - 1) for row in self.token_ids)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens, of all rows, per second."""
        return sum(self.prompt_tokens) / self.prefill_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Decoded tokens per second; NaN without such tokens."""
        return self.decoded_tokens / self.decode_s if self.decoded_tokens else float("nan")

    def __str__(self) -> str:
        rows = len(self.token_ids)
        lines = [
            f"prefill  {sum(self.prompt_tokens):6} tokens in {self.prefill_s:8.3f} s: "
            f"{self.prefill_tokens_per_s:10,.1f} tokens/s"
        ]
        if self.decoded_tokens:
            lines.append(
                f"decode   {self.decoded_tokens:6} tokens in {self.decode_s:8.3f} s: "
                f"{self.decode_tokens_per_s:10,.1f} tokens/s"
                + (f" (batch {rows})" if rows > 1 else "")
            )
        if self.step_s:
            median = statistics.median(self.step_s)
            lines[-1] += f", {1e3 * median:.2f} ms a step (median), {1 / median:,.1f} steps/s"
        lines.append(f"cache    {self.cache}")
        lines.append(
            f"memory   {format_bytes(self.peak_bytes)} at the peak, "
            f"{format_bytes(self.mean_bytes)} on average, beyond the start ({self.memory})"
        )
        own = f"Transformers' own ({self.attention_name})"
        ran = str(self.attention) if self.attention else own
        lines += [f"attention  {line}" for line in ran.splitlines()]
        if self.cache == "graphed":
            lines[-1] += " (prefill)"
            lines.append("attention  in the decode steps: the lab's decode kernels")
        return "\n".join(lines)


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: str | Sequence[str],
    *,
    max_new_tokens: int = 64,
    cache: Kind | Literal["auto"] | type = "auto",
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
        max_new_tokens: the largest number of new tokens; 0 runs the prefill alone.
        cache: "dynamic" grows by one column a token; "static" has its full size from the start; or
            a class like exercise 2-6's, whose `append(k, v)` returns all keys and values so far;
            "graphed" is the lab's fast loop (`GraphedDecoder`; Llama); "auto" is `fastest_cache`.
        temperature: 0 takes the likeliest token; else logits are divided by it and sampled.
        top_k: sample among this many likeliest tokens.
        seed: of the sampling; the same seed gives the same text on the same device.
        stop_at_end: a row stops at its end token; the loop, when all rows have.
        chat: wrap each prompt by the tokenizer's chat template.
        on_step: called after each step with its number, the tokens, its seconds.

    Raises:
        ValueError: options that make no sense; a prompt, or a tokenizer, that does not fit; a model
            in training mode with dropout, one that does not continue texts, or one whose logits are
            not finite.

    >>> story = load_model("stories15m", device="cpu")
    >>> generate(story.model, story.tokenizer, "Once upon a time", max_new_tokens=8).texts
    [', there was a little girl named L']
    """
    check_model(model)
    if cache == "auto":
        cache = fastest_cache(model, steps=on_step is not None)
    if cache not in KINDS and not isinstance(cache, type):
        raise ValueError(f"cache must be one of {', '.join(KINDS)}, got {cache!r}")
    options: dict[str, Any] = {"sample": Sampler(model.device, temperature, top_k, seed)}
    if cache == "graphed" and (on_step or model.device.type != "cuda"):
        raise ValueError(
            "the graphed loop needs a GPU, and does not stop after each step: "
            'use cache="dynamic" on a CPU, or to watch the steps'
        )
    batch = encode(tokenizer, prompts, model.device, chat=chat)
    check_room(model, batch, max_new_tokens)
    ends = end_tokens(model, tokenizer) if stop_at_end else ()
    before = _attention_of(model)
    if model.device.type == "cpu":
        # Weights may still be in their file, memory-mapped: an element of every page brings them
        # in, so that the prefill neither waits for the disk nor counts them as its memory.
        for parameter in model.parameters():
            parameter.detach().flatten()[::1024].sum()
    if cache == "graphed":
        options |= {"batch": len(batch.lengths), "length": batch.width + max_new_tokens}
        run = GraphedDecoder(model, **options).run
    else:
        run = partial(prefill_and_decode, model, **options, cache=cache, on_step=on_step)
    with MemorySampler(model.device) as memory:
        done = run(batch, max_new_tokens, ends=ends)
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
        cache=cache if isinstance(cache, str) else cache.__name__,
        attention_name=str(model.config._attn_implementation),
        attention=UsedTable(
            replace(use, calls=calls - before.get(use, 0))
            for use, calls in _attention_of(model).items()
            if calls > before.get(use, 0)
        ),
    )


@torch.inference_mode()
def prefill_and_decode(
    model: PreTrainedModel,
    batch: Batch,
    max_new_tokens: int,
    *,
    cache: Literal["dynamic", "static"] | type = "dynamic",
    sample: Callable[[Tensor], Tensor] = lambda logits: logits.argmax(-1),
    ends: Sequence[int] = (),
    on_step: OnStep | None = None,
) -> Decoded:
    """Run one prefill, then a forward for every further token: the loop of `generate`.

    Args:
        batch: the prompts' tokens.
        sample: from logits (batch, vocabulary) to tokens (batch,).
        ends: tokens that end a row; none: all rows get `max_new_tokens`.

    Raises:
        ValueError: tokens that do not fit to the model; an unknown cache; logits of the first or
            the last step that are not finite.
    """
    check_room(model, batch, max_new_tokens)
    from transformers import DynamicCache, StaticCache

    length, config = batch.width + max_new_tokens, model.config
    past: Any
    if isinstance(cache, type):
        past = _own_cache(cache)
    elif cache == "static":
        past = StaticCache(config, max_cache_len=length)
    elif cache == "dynamic":
        past = DynamicCache(config=config)
    else:
        raise ValueError(f"cache must be dynamic, static, or a class, got {cache!r}")
    mask = batch.mask(length)
    endings = torch.tensor(ends, device=model.device)

    logits = torch.empty(0)

    def forward(ids: Tensor, positions: Tensor, seen: int) -> Tensor:
        nonlocal logits
        # The last position's logits alone: those of a long prompt would be larger than the model.
        logits = model(
            ids,
            attention_mask=None if mask is None else mask[:, :seen],
            position_ids=positions,
            past_key_values=past,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]  # (batch, vocabulary)
        return sample(logits)  # (batch,)

    start = now(model.device)
    token = forward(batch.ids, batch.positions, batch.width)
    prefill_s = now(model.device) - start
    check_logits(logits)
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
    check_logits(logits)  # NaN of a step before stays in the cache, and comes out again
    return Decoded(cut(tokens, batch, ends), prefill_s, sum(step_s), tuple(step_s))


def fastest_cache(model: PreTrainedModel, *, steps: bool = False) -> Kind:
    """Return the cache with the fastest decode steps that the device and these options allow.

    `steps` means that each step is to be watched. On a GPU "graphed" wins; it knows Llamas only.
    """
    if model.device.type != "cuda" or steps or mode.missing():
        return "dynamic"
    return "graphed" if LlamaStep.fits(model) else "dynamic"


def _own_cache(make: type) -> Any:
    """Return a cache of Transformers' kind, with an object of `make`'s for each layer."""
    from transformers.cache_utils import Cache, DynamicLayer

    class Layer(DynamicLayer):
        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
            if not self.is_initialized:
                self.own, self.is_initialized = make(), True
            self.keys, self.values = self.own.append(key_states, value_states)
            return self.keys, self.values

    return Cache(layer_class_to_replicate=Layer)


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that end a text: the model's generation settings, else the tokenizer's.

    (An instruction-tuned model may end its turn with another token than its texts.)
    """
    settings: Any = model.generation_config
    ends = settings.eos_token_id if settings else None
    ends = tokenizer.eos_token_id if ends is None else ends
    if ends is None:
        return ()
    return tuple(ends) if isinstance(ends, list | tuple) else (ends,)


def _attention_of(model: PreTrainedModel) -> dict[Used, int]:
    return {replace(use, calls=0): use.calls for use in attention_used(model)}
