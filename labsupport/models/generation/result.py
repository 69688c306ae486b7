"""What a generation gives back: texts, tokens, times, memory, and which attention ran."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labsupport.profiling.units import format_bytes

if TYPE_CHECKING:
    from labsupport.models.integration.used import Used


@dataclass(frozen=True)
class Decoded:
    """What a loop gives back: new tokens by row, cut behind the first end token, and times in s.

    step_s holds the decode steps one by one; it is empty for a loop that does not stop after each.
    """

    tokens: list[list[int]]
    prefill_s: float
    decode_s: float
    step_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class Generation:
    """Generated texts, and what they cost.

    texts: the new text of each prompt, without special tokens.
    token_ids: its tokens, the end token included.
    prompt_tokens: tokens of each prompt, padding not counted.
    prefill_s, decode_s: seconds; the first new token belongs to the prefill. The model is there
        before the clock starts; in a process's first call, libraries still wake up.
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
    attention: tuple[Used, ...] = ()

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
        """New tokens of all rows, without each row's first, per second; NaN without such tokens."""
        tokens = self.decoded_tokens
        return tokens / self.decode_s if tokens else float("nan")

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
            lines[-1] += f", {1e3 * statistics.median(self.step_s):.2f} ms a step (median)"
        lines.append(
            f"memory   {format_bytes(self.peak_bytes)} at the peak, "
            f"{format_bytes(self.mean_bytes)} on average, beyond the start ({self.memory})"
        )
        ran = attention_lines(self.attention) or [f"Transformers' own ({self.attention_name})"]
        lines += [f"attention  {line}" for line in ran]
        if self.cache == "graphed":
            lines[-1] += " (prefill)"
            lines.append("attention  in the decode steps: two products over the cache (graphed.py)")
        return "\n".join(lines)


def attention_lines(uses: Sequence[Used]) -> list[str]:
    """Which attention ran, one line for each implementation: 'sdpa_flash (...) in layers 0-29'."""
    from labsupport.models.integration.used import kind_of_attention, ranges

    layers: dict[str, list[int]] = {}
    for use in uses:
        kind = kind_of_attention(use.backend, use.io_aware)
        name = f"{kind} ({use.backend}: {use.kernel})"
        layers.setdefault(name, []).append(use.layer)
    return [f"{name} in layers {ranges(which)}" for name, which in layers.items()]
