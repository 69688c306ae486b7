"""Decode as fast as the memory allows: the lab's own loop.

In an ordinary loop Python launches some hundred kernels for each token, one by one. Here a step has
fixed shapes and changes tokens, lengths and caches in place. So all steps are the same kernels, and
a CUDA graph replays a whole step, the choice of the next token included, with one launch. The CPU
looks for end tokens once in CHECK_EVERY steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from labsupport.attention import BackendUnavailableError
from labsupport.attention.kernels import mode
from labsupport.models.generation.prompts import (
    Batch,
    Decoded,
    Sampler,
    check_logits,
    check_room,
    cut,
)
from labsupport.models.generation.steps import LlamaStep
from labsupport.profiling.timing import now

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHECK_EVERY = 32


class GraphedDecoder:
    """Decoding for a fixed batch and a bounded length.

    Making one compiles the kernels, once for a shape of model; `run` may be called often. It keeps
    a copy of some of the model's weights (see `steps`) and a cache of the full length. On a CPU
    Triton interprets the kernels, which is slow.

    Args:
        model: a Llama of Transformers, in eval mode.
        batch: rows.
        length: slots of the cache: prompt and new tokens of the longest row.
        sample: the choice of tokens, greedy unless given.

    Raises:
        ValueError: a model that no step is written for.
        BackendUnavailableError: Triton's kernels cannot run here.
    """

    def __init__(
        self, model: PreTrainedModel, *, batch: int = 1, length: int, sample: Sampler | None = None
    ) -> None:
        if reason := mode.missing():
            raise BackendUnavailableError(f"no graphed loop: {reason}", {"graphed": (reason,)})
        self.model, self.length = model, length
        self.sample = sample or Sampler(model.device)
        self.step = LlamaStep(model, batch, length)
        self._advance: Callable[[], Any] = self._next
        if model.device.type == "cuda":
            with torch.cuda.device(model.device):
                self._advance = self._captured().replay

    @torch.no_grad()
    def run(self, batch: Batch, max_new_tokens: int, *, ends: Sequence[int] = ()) -> Decoded:
        """Continue the prompts; the tokens are those of `prefill_and_decode`, up to rounding.

        The prefill is the model's own. Rows that have ended are computed on until all have, and
        cut; so are the up to CHECK_EVERY steps until that is noticed. Their time counts.

        Raises:
            ValueError: more rows or tokens than this decoder was made for; logits of the first or
                the last step that are not finite.
        """
        rows = len(self.step.token)
        if len(batch.lengths) != rows or batch.width + max_new_tokens > self.length:
            raise ValueError(
                f"this decoder was made for {rows} rows of {self.length} tokens, but "
                f"{len(batch.lengths)} of {batch.width} + {max_new_tokens} were given"
            )
        check_room(self.model, batch, max_new_tokens)
        self.sample.restart()
        start = now(self.model.device)
        self._prefill(batch)
        prefill_s = now(self.model.device) - start
        endings = torch.tensor(ends, device=self.model.device)
        made = min(1, max_new_tokens)
        start = now(self.model.device)
        while made < max_new_tokens:
            if ends and torch.isin(self._tokens(made), endings).any(dim=1).all():
                break
            for _ in range(min(CHECK_EVERY, max_new_tokens - made)):
                self._advance()
                made += 1
        decode_s = now(self.model.device) - start
        if made > 1:
            check_logits(self.step.logits)
        tokens = self._tokens(made).unbind(dim=1) if made else ()
        return Decoded(cut(tokens, batch, ends), prefill_s, decode_s if made > 1 else 0.0)

    def _prefill(self, batch: Batch) -> None:
        from transformers import DynamicCache

        past: Any = DynamicCache(config=self.model.config)
        logits = self.model(
            batch.ids,
            attention_mask=batch.mask(batch.width),
            position_ids=batch.positions,
            past_key_values=past,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        # Each row's keys begin at slot 0; what is copied beyond its length is written again.
        columns = torch.arange(batch.width, device=batch.ids.device) + batch.starts[:, None]
        columns = columns.clamp(max=batch.width - 1)
        rows = torch.arange(len(columns), device=batch.ids.device)[:, None]
        for layer, keys, values in zip(past.layers, self.step.keys, self.step.values, strict=True):
            keys[:, : batch.width] = layer.keys.transpose(1, 2)[rows, columns]
            values[:, : batch.width] = layer.values.transpose(1, 2)[rows, columns]
        for lengths in (self.step.seqlens, self.step.prompts):
            lengths.copy_(batch.width - batch.starts)
        check_logits(logits)
        self.step.token.copy_(self.sample(logits))

    def _next(self) -> None:
        self.step.token.copy_(self.sample(self.step()))

    def _tokens(self, made: int) -> Tensor:
        """Return the new tokens (batch, made); a step stores the token that it takes."""
        return torch.cat([self.step.output[:, : made - 1], self.step.token[:, None]], dim=1)

    @torch.no_grad()
    def _captured(self) -> torch.cuda.CUDAGraph:
        """Capture a step, once compiled; its results go to slots that every run writes again."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._next()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.sample.generator)
        with torch.cuda.graph(graph):
            self._next()
        return graph
