"""The same weights and the same prompt under two kinds of attention, in one process.

**How far may the logits differ?** Both kinds compute the same function, and both round. So neither
is the truth: that is the model in float64 (float32 for a 16-bit model on a GPU). flash-attn's own
tests judge attention by this rule, and here it is carried over to logits: the maximum error of the
kind in question may be twice that of the standard one, plus 1e-5. Theirs are outputs of about unit
size; so here the 1e-5 is a part of the logits' standard deviation.

**May the texts differ?** The greedy choice jumps where two logits are closer than both errors
together. Up to there the texts are equal; behind it they are two different texts. If e is the
standard kind's error and b the other's bound, the choice can change as long as the standard kind's
logits of the two tokens are at most 2 (e + b) apart: each of the two logits moves by e + b at most.
(e and b come from the prompt's positions, so this judges, and does not prove.)
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from labsupport.models.generation.generate import generate
from labsupport.models.generation.oracle import oracle_logits, prompt_logits
from labsupport.models.generation.prompts import Batch, check_model, check_room, encode
from labsupport.models.generation.result import Generation
from labsupport.profiling.memory import measure_peak_memory
from labsupport.profiling.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FACTOR = 2.0  # the other kind's error against the standard one's
SLACK = 1e-5  # of the logits' standard deviation
DECODE = "decode_tokens_per_s"  # NaN without a decode step


@dataclass(frozen=True)
class Comparison:
    """Two kinds of attention on one prompt; the first named is the standard to judge by.

    backends: their names.
    table: one row a kind: backend, kernel, prefill_tokens_per_s, decode_tokens_per_s (medians),
        prefill_peak_bytes (extra memory of the prefill, exact), peak_bytes and mean_bytes (of the
        whole generation), max_error (of the prompt's logits against the oracle).
    generations: the last run of each kind.
    max_difference: of the prompt's logits between the two.
    bound: what max_error of the second may be.
    oracle: how the truth was computed.
    parted_at: index of the first new token that differs; None when all are equal.
    gap, near_tie: there, the difference of the two tokens' logits (standard attention), and the
        largest one at which rounding may change the choice; NaN when the texts are equal.
    """

    backends: tuple[str, str]
    table: pd.DataFrame
    generations: dict[str, Generation]
    max_difference: float
    bound: float
    oracle: str
    parted_at: int | None
    gap: float
    near_tie: float

    @property
    def same_text(self) -> bool:
        """All greedy tokens are equal."""
        return self.parted_at is None

    @property
    def logits_agree(self) -> bool:
        """The second kind's error is within the bound."""
        return bool(self.table.max_error.iloc[1] <= self.bound)

    @property
    def agree(self) -> bool:
        """The logits agree, and the texts are equal or part at a near-tie."""
        return self.logits_agree and (self.same_text or self.gap <= self.near_tie)

    def __str__(self) -> str:
        first, second = self.table.to_dict("records")
        lines = []
        for row in (first, second):
            lines += [
                f"{row['backend']} ({row['kernel']})",
                f"  prefill {row['prefill_tokens_per_s']:,.1f} tokens/s, "
                f"{format_bytes(row['prefill_peak_bytes'])} extra",
                *([f"  decode  {rate:,.1f} tokens/s"] if (rate := row[DECODE]) == rate else []),
                f"  memory  {format_bytes(row['peak_bytes'])} at the peak, "
                f"{format_bytes(row['mean_bytes'])} on average "
                f"({self.generations[row['backend']].memory})",
                f"  logits  {row['max_error']:.2e} at most from {self.oracle}",
            ]
        verdict = "within" if self.logits_agree else "OUTSIDE"
        lines.append(
            f"logits: {self.max_difference:.2e} apart; the error of {second['backend']} is "
            f"{verdict} {self.bound:.2e} "
            f"({FACTOR:g} x that of {first['backend']} + {SLACK:g} of their spread)"
        )
        count = min(len(g.token_ids[0]) for g in self.generations.values())
        if self.same_text:
            lines.append(f"text:   the same {count} tokens")
        else:
            kind = "a near-tie" if self.gap <= self.near_tie else "NOT a near-tie"
            lines.append(
                f"text:   parts at new token {self.parted_at}, where the two logits are "
                f"{self.gap:.2e} apart: {kind} (rounding explains {self.near_tie:.2e})"
            )
        return "\n".join(lines)


def compare_attention(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    backends: tuple[str, str] = ("standard", "flash"),
    max_new_tokens: int = 64,
    chat: bool = False,
    repeats: int = 3,
) -> Comparison:
    """Generate greedily under both kinds of attention, and say how far they agree.

    Args:
        backends: as `set_attention` takes them; the first is the standard to judge by. The model
            keeps the second one afterwards.
        repeats: timed runs of each kind, in turns, after one that does not count.

    Raises:
        ValueError: not two different backends; otherwise as `generate` and `set_attention`.
    """
    from labsupport.models.integration.used import each_line_once

    if len(set(backends)) != 2 or len(backends) != 2:
        raise ValueError(f"two different backends are needed, got {', '.join(backends)}")
    check_model(model)
    batch = encode(tokenizer, prompt, model.device, chat=chat)
    check_room(model, batch, max_new_tokens)
    with each_line_once():
        return _compare(model, tokenizer, prompt, batch, backends, max_new_tokens, chat, repeats)


def _compare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    batch: Batch,
    backends: tuple[str, str],
    max_new_tokens: int,
    chat: bool,
    repeats: int,
) -> Comparison:
    from labsupport.models.integration.select import set_attention

    truth, oracle = oracle_logits(model, batch)

    runs: dict[str, list[Generation]] = {name: [] for name in backends}
    logits, prefill_bytes = {}, {}
    for name in backends:
        set_attention(model, name)
        generate(model, tokenizer, prompt, max_new_tokens=min(2, max_new_tokens), chat=chat)
        logits[name] = prompt_logits(model, batch)
        memory = measure_peak_memory(lambda: _prefill(model, batch), device=model.device)
        prefill_bytes[name] = memory.peak_bytes
    for _ in range(repeats):
        for name in backends:
            set_attention(model, name)
            run = generate(model, tokenizer, prompt, max_new_tokens=max_new_tokens, chat=chat)
            runs[name].append(run)

    first, second = backends
    error = {name: _distance(logits[name], truth) for name in backends}
    slack = SLACK * truth.std().item()
    bound = FACTOR * error[first] + slack
    generations = {name: runs[name][-1] for name in backends}
    parted_at = first_difference(*(generations[name].token_ids[0] for name in backends))
    gap = near_tie = float("nan")
    if parted_at is not None:
        set_attention(model, first)
        gap = _gap(model, batch, [generations[name].token_ids[0] for name in backends], parted_at)
        near_tie = 2 * (error[first] + bound)
        set_attention(model, second)
    return Comparison(
        backends=backends,
        table=_table(runs, prefill_bytes, error),
        generations=generations,
        max_difference=_distance(logits[first], logits[second]),
        bound=bound,
        oracle=oracle,
        parted_at=parted_at,
        gap=gap,
        near_tie=near_tie,
    )


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first index at which two rows of tokens differ, None if they are equal.

    A row that ends earlier differs where it ends.
    """
    for index, pair in enumerate(zip(a, b, strict=False)):
        if pair[0] != pair[1]:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


@torch.inference_mode()
def _prefill(model: PreTrainedModel, batch: Batch) -> Any:
    return model(batch.ids, use_cache=True, logits_to_keep=1)


def _gap(model: PreTrainedModel, batch: Batch, rows: list[list[int]], index: int) -> float:
    """How far apart the two chosen tokens' logits are, in the text that both rows share."""
    if any(len(row) <= index for row in rows):
        raise AssertionError("greedy rows that end differently differ in the token that ends one")
    shared = torch.tensor([rows[0][:index]], dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        ids = torch.cat([batch.ids, shared], dim=1)
        logits = model(ids, use_cache=False, logits_to_keep=1).logits[0, -1].double()
    return float(logits[rows[0][index]] - logits[rows[1][index]])


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


def _table(
    runs: dict[str, list[Generation]], prefill_bytes: dict[str, int], error: dict[str, float]
) -> pd.DataFrame:
    import pandas as pd

    rows = []
    for name, done in runs.items():
        kernels = dict.fromkeys(use.kernel for use in done[-1].attention)
        rows.append(
            {
                "backend": name,
                "kernel": " and ".join(kernels),
                "prefill_tokens_per_s": statistics.median(g.prefill_tokens_per_s for g in done),
                DECODE: statistics.median(g.decode_tokens_per_s for g in done),
                "prefill_peak_bytes": prefill_bytes[name],
                # The largest: on a CPU a later run may find memory that was not given back.
                "peak_bytes": max(g.peak_bytes for g in done),
                "mean_bytes": max(g.mean_bytes for g in done),
                "max_error": error[name],
            }
        )
    return pd.DataFrame(rows)
