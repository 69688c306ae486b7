"""The same weights and the same prompt under two kinds of attention, in one process.

**How far may the logits differ?** Both kinds round; the truth is the model in float64 (float32 for
a 16-bit model on a GPU). As in flash-attn's own tests, the maximum error of the kind in question
may be twice that of the standard one, plus 1e-5 of the logits' standard deviation.

**May the texts differ?** The greedy choice jumps where two logits are closer than both errors
together. Up to there the texts are equal; from there on they are two different texts. If e is the
standard kind's error and b the other's bound, the choice can change as long as the standard kind's
logits of the two tokens are at most 2 (e + b) apart: each of the two logits moves by e + b at most.
(e and b come from the prompt's positions, so this judges, and does not prove.)
"""

from __future__ import annotations

import copy
import itertools
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from labsupport.attention.accuracy import max_error
from labsupport.models.generation.generate import Generation, generate
from labsupport.models.generation.prompts import Batch, check_model, check_room, encode
from labsupport.models.integration import set_attention
from labsupport.models.integration.trace import silent
from labsupport.profiling.memory import measure_peak_memory
from labsupport.profiling.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FACTOR = 2.0  # the other kind's error against the standard one's
SLACK = 1e-5  # of the logits' standard deviation
POSITIONS = 256  # the logits of all positions of a long prompt would not fit


@dataclass(frozen=True)
class Comparison:
    """Two kinds of attention on one prompt; the first named is the standard to judge by.

    backends: their names.
    table: one row a kind: backend, kernel, prefill_tokens_per_s, decode_tokens_per_s (medians; NaN
        without a decode step), prefill_peak_bytes (extra memory of the prefill, exact), peak_bytes
        and mean_bytes (of the whole generation), max_error (of the prompt's logits against the
        oracle).
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
        lines = []
        for row in self.table.to_dict("records"):
            rate = row["decode_tokens_per_s"]
            lines += [
                f"{row['backend']} ({row['kernel']})",
                f"  prefill {row['prefill_tokens_per_s']:,.1f} tokens/s, "
                f"{format_bytes(row['prefill_peak_bytes'])} extra",
                *([f"  decode  {rate:,.1f} tokens/s"] if rate == rate else []),
                f"  memory  {format_bytes(row['peak_bytes'])} at the peak, "
                f"{format_bytes(row['mean_bytes'])} on average "
                f"({self.generations[row['backend']].memory})",
                f"  logits  {row['max_error']:.2e} at most from {self.oracle}",
            ]
        first, second = self.backends
        verdict = "within" if self.logits_agree else "OUTSIDE"
        lines.append(
            f"logits: {self.max_difference:.2e} apart; the error of {second} is {verdict} "
            f"{self.bound:.2e} ({FACTOR:g} x that of {first} + {SLACK:g} of their spread)"
        )
        if self.same_text:
            lines.append(f"text:   the same {len(self.generations[first].token_ids[0])} tokens")
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
    """Generate greedily under both kinds of attention, and compare the results.

    Args:
        backends: as `set_attention` takes them; the first is the standard to judge by. The model
            keeps the second one afterwards.
        repeats: timed runs of each kind, in turns, after one that does not count.

    Raises:
        ValueError: not two different backends, not one text, repeats below 1; otherwise as
            `generate` and `set_attention`.

    >>> story = load_model("stories15m", device="cpu")
    >>> both = compare_attention(
    ...     story.model, story.tokenizer, "Once upon a time", max_new_tokens=4, repeats=1
    ... )
    >>> both.same_text
    True
    """
    import pandas as pd
    from tqdm.auto import tqdm

    if isinstance(backends, str) or len(set(backends)) != 2 or len(backends) != 2:
        raise ValueError(f"two different backends are needed, got {', '.join(backends)}")
    if not isinstance(prompt, str) or repeats < 1:
        raise ValueError(f"one text and at least 1 repeat are needed: {prompt!r:.40}, {repeats}")
    check_model(model)
    batch = encode(tokenizer, prompt, model.device, chat=chat)
    check_room(model, batch, max_new_tokens)
    runs: dict[str, list[Generation]] = {name: [] for name in backends}
    logits, extra = {}, {}
    runs_in_all = 1 + (1 + repeats) * len(backends)
    with tqdm(total=runs_in_all, unit="run", leave=False, disable=None) as bar:  # on a terminal
        with silent():
            truth, oracle = oracle_logits(model, batch)
        bar.update()
        for name in backends:
            set_attention(model, name)
            few = min(2, max_new_tokens)
            generate(model, tokenizer, prompt, max_new_tokens=few, cache="dynamic", chat=chat)
            logits[name] = prompt_logits(model, batch)
            extra[name] = measure_peak_memory(lambda: _prefill(model, batch), device=model.device)
            bar.update()
        with silent():
            for name in backends * repeats:
                set_attention(model, name)
                options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "chat": chat}
                done = generate(model, tokenizer, prompt, cache="dynamic", **options)
                runs[name].append(done)
                bar.update()

    first, second = backends
    error = {name: max_error(logits[name], truth) for name in backends}
    bound = FACTOR * error[first] + SLACK * truth.std().item()
    generations = {name: runs[name][-1] for name in backends}
    rows = [generations[name].token_ids[0] for name in backends]
    # A row that ends earlier differs where it ends.
    pairs = enumerate(itertools.zip_longest(*rows))
    parted_at = next((index for index, (a, b) in pairs if a != b), None)
    gap = near_tie = float("nan")
    if parted_at is not None:
        with silent():
            set_attention(model, first)
            gap = _gap(model, batch, rows, parted_at)
        near_tie = 2 * (error[first] + bound)
        set_attention(model, second)
    table = pd.DataFrame(
        {
            "backend": name,
            "kernel": " and ".join(dict.fromkeys(use.kernel for use in runs[name][-1].attention)),
            "prefill_tokens_per_s": statistics.median(r.prefill_tokens_per_s for r in runs[name]),
            "decode_tokens_per_s": statistics.median(r.decode_tokens_per_s for r in runs[name]),
            "prefill_peak_bytes": extra[name].peak_bytes,
            # The largest: on a CPU a later run may find memory that was not given back.
            "peak_bytes": max(run.peak_bytes for run in runs[name]),
            "mean_bytes": max(run.mean_bytes for run in runs[name]),
            "max_error": error[name],
        }
        for name in backends
    )
    return Comparison(
        backends=backends,
        table=table,
        generations=generations,
        max_difference=max_error(logits[first], logits[second]),
        bound=bound,
        oracle=oracle,
        parted_at=parted_at,
        gap=gap,
        near_tie=near_tie,
    )


@torch.inference_mode()
def _prefill(model: PreTrainedModel, batch: Batch) -> Any:
    return model(batch.ids, use_cache=True, logits_to_keep=1)


@torch.inference_mode()
def _gap(model: PreTrainedModel, batch: Batch, rows: list[list[int]], index: int) -> float:
    """Return how far apart the two chosen tokens' logits are, after the text that rows share."""
    shared = torch.tensor([rows[0][:index]], dtype=torch.int64, device=model.device)
    ids = torch.cat([batch.ids, shared], dim=1)
    logits = model(ids, use_cache=False, logits_to_keep=1).logits[0, -1].double()
    return float(logits[rows[0][index]] - logits[rows[1][index]])


# --- the oracle -----------------------------------------------------------------------------------


@torch.inference_mode()
def prompt_logits(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Return logits of the last POSITIONS positions, on the CPU: (positions, vocabulary)."""
    keep = min(batch.width, POSITIONS)
    return model(batch.ids, use_cache=False, logits_to_keep=keep).logits[0].double().cpu()


def oracle_logits(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, str]:
    """Return `prompt_logits` at this device's highest precision, and its name."""
    wide = torch.float64
    if model.device.type == "cuda" and model.dtype in (torch.float16, torch.bfloat16):
        wide = torch.float32  # exact enough to judge 16 bits, and fast on every GPU
    exact = copy.deepcopy(model)
    for parameter in exact.parameters():  # not the buffers: rotary angles are float32 by definition
        parameter.data = parameter.data.to(wide)
    set_attention(exact, "standard")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # no TF32
    try:
        with _StayWide():
            return prompt_logits(exact, batch), f"the model in {str(wide).removeprefix('torch.')}"
    finally:
        torch.set_float32_matmul_precision(before)


class _StayWide(TorchFunctionMode):
    """Leave float64 tensors as they are where a module asks for float32, as RMSNorms do."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        narrows = func is Tensor.float or (func is Tensor.to and torch.float32 in args)
        if narrows and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))
