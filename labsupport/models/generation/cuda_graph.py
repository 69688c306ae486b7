"""Decode as fast as the memory allows: the lab's own loop.

In an ordinary loop Python launches some hundred kernels for each token, one by one. Here:

1. Shapes are fixed, and a step changes token, slot and cache in place: all steps are the same
   kernels.
2. `torch.compile` fuses the small operations between the matrix products.
3. A CUDA graph replays a whole step with one launch. The CPU looks for end tokens once in
   CHECK_EVERY steps.

Attention would read all slots, also empty ones. So the cache is read up to a bound, with one graph
for each: FIRST_SPAN slots, then twice as many, and so on. On a CPU the step runs uncompiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._triton import has_triton

from labsupport.models.generation.prompts import Batch, Decoded, check_room, cut
from labsupport.models.generation.steps import LlamaStep
from labsupport.profiling.timing import now

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHECK_EVERY = 32
FIRST_SPAN = 1024
MODE = "max-autotune-no-cudagraphs"  # the graph is captured here, over the whole step


class GraphedDecoder:
    """Greedy decoding for a fixed batch and a bounded length.

    Making one takes long on a GPU (it compiles, and captures); `run` may then be called often. It
    keeps a copy of some of the model's weights (see `steps`) and a cache of the full length.

    Args:
        model: a Llama of Transformers, in eval mode.
        batch: rows.
        length: slots of the cache: prompt and new tokens.
        compile: with torch.compile (on a CPU that needs a C++ compiler); by default on GPUs where
            Triton is installed.

    Attributes:
        how: in words, how a step is run.

    Raises:
        ValueError: a model that no step is written for.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        batch: int = 1,
        length: int,
        compile: bool | None = None,
    ) -> None:
        device, gpu = model.device, model.device.type == "cuda"
        compile = gpu and has_triton() if compile is None else compile
        self.how = "compiled" if compile else "not compiled"
        self.how += ", a step is one CUDA graph" if gpu else ", without a graph (CPU)"
        self.model, self.length, self.step = model, length, LlamaStep(model, length)
        size = (batch, self.step.kv_heads, length, self.step.head_dim)
        self.keys = [torch.zeros(size, dtype=model.dtype, device=device) for _ in self.step.layers]
        self.values = [torch.zeros_like(keys) for keys in self.keys]
        self.slots = torch.arange(length, device=device)
        # The state that a step moves on.
        self.token = torch.zeros(batch, dtype=torch.int64, device=device)
        self.slot = torch.zeros(1, dtype=torch.int64, device=device)  # of `token`
        self.first = torch.zeros(batch, 1, dtype=torch.int64, device=device)  # after the padding
        self.output = torch.zeros(batch, length + 1, dtype=torch.int64, device=device)

        self.spans = [FIRST_SPAN]
        while self.spans[-1] < length:
            self.spans.append(2 * self.spans[-1])
        self.spans[-1] = min(self.spans[-1], length)
        self._run_step = self._advance
        if compile:
            self._run_step = torch.compile(
                self._advance, fullgraph=True, dynamic=False, mode=MODE if gpu else None
            )
        self.graphs: list[torch.cuda.CUDAGraph] = []
        if gpu:
            # Each span is a separate compilation; so is each decoder that was made before.
            with torch._dynamo.config.patch(recompile_limit=64), torch.cuda.device(device):
                self.graphs = [self._capture(span) for span in self.spans]

    @torch.no_grad()
    def run(self, batch: Batch, max_new_tokens: int, *, ends: Sequence[int] = ()) -> Decoded:
        """Continue the prompts; the tokens are those of `prefill_and_decode`, up to rounding.

        The prefill is the model's own. Rows that have ended are computed on until all have, and
        cut; so are the up to CHECK_EVERY steps until that is noticed. Their time counts.

        Raises:
            ValueError: more rows or tokens than this decoder was made for.
        """
        rows = len(self.token)
        if len(batch.lengths) != rows or batch.width + max_new_tokens > self.length:
            raise ValueError(
                f"this decoder was made for {rows} rows of {self.length} tokens, but "
                f"{len(batch.lengths)} of {batch.width} + {max_new_tokens} were given"
            )
        check_room(self.model, batch, max_new_tokens)
        gpu = bool(self.graphs)
        start = now(self.model.device)
        self._prefill(batch)
        prefill_s = now(self.model.device) - start
        made = min(1, max_new_tokens)
        endings = torch.tensor(ends, device=self.model.device)
        start = now(self.model.device)
        while made < max_new_tokens and not self._all_ended(batch.width, made, endings):
            for _ in range(min(CHECK_EVERY, max_new_tokens - made)):
                used = batch.width + made  # slots that hold a token or are about to
                index = next(i for i, span in enumerate(self.spans) if span >= used)
                self.graphs[index].replay() if gpu else self._run_step(self.spans[index])
                made += 1
        decode_s = now(self.model.device) - start
        columns = self.output[:, batch.width : batch.width + made].unbind(dim=1)
        return Decoded(cut(columns, batch, ends), prefill_s, decode_s if made > 1 else 0.0)

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
        for layer, keys, values in zip(past.layers, self.keys, self.values, strict=True):
            keys[:, :, : batch.width] = layer.keys
            values[:, :, : batch.width] = layer.values
        self.token.copy_(logits.argmax(-1))
        self.slot.fill_(batch.width)
        self.first.copy_(batch.starts[:, None])
        self.output[:, batch.width] = self.token

    def _advance(self, span: int) -> None:
        """Compute the next token from the newest one; attention sees slots below `span`."""
        slots = self.slots[:span]
        hidden = (slots > self.slot) | (slots < self.first)  # (batch, span)
        hidden = hidden[:, None, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.keys[layer].index_copy_(2, self.slot, k[:, :, None])
            self.values[layer].index_copy_(2, self.slot, v[:, :, None])
            keys, values = self.keys[layer][:, :, :span], self.values[layer][:, :, :span]
            # Query heads that share a key head are the rows of one product: K is read once.
            q = q.unflatten(1, (keys.shape[1], -1))  # (batch, kv_heads, group, head_dim)
            scores = (q @ keys.mT).float() * q.shape[-1] ** -0.5
            weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
            return (weights.to(values.dtype) @ values).flatten(1)

        logits = self.step(self.token, (self.slot - self.first[:, 0]), attend)
        self.token.copy_(logits.argmax(-1))
        self.slot.add_(1)
        self.output.index_copy_(1, self.slot, self.token[:, None])

    @torch.no_grad()
    def _capture(self, span: int) -> torch.cuda.CUDAGraph:
        """Capture a step. What it computes goes to slot 0, which every prefill writes again.

        Compiling, choosing between kernels and the libraries' workspaces come before the capture,
        on a stream of their own.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.slot.zero_()
                self._run_step(span)
        torch.cuda.current_stream().wait_stream(stream)
        self.slot.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run_step(span)
        return graph

    def _all_ended(self, width: int, made: int, ends: Tensor) -> bool:
        if not len(ends):  # then the CPU need not wait for the GPU
            return False
        return bool(torch.isin(self.output[:, width : width + made], ends).any(dim=1).all())
