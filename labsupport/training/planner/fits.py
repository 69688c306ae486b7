"""From a limit back to lengths: what fits, and with which remedies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from labsupport.training.model import DecoderConfig, Savings
from labsupport.training.planner.plan import plan_memory
from labsupport.training.saving.limit import parse_bytes

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Rung:
    """A step of the ladder: what is done to save memory, all that was done before included."""

    name: str
    savings: Savings
    autocast: torch.dtype | None = None


_TEXTBOOK, _FLASH = Savings(attention="standard"), Savings()
_LOSS = Savings(loss_chunk=1024)
_CHECKPOINT = Savings(loss_chunk=1024, checkpoint=True)
_MLP = Savings(loss_chunk=1024, checkpoint=True, mlp_chunk=1024)
_RESIDUAL = Savings(loss_chunk=1024, checkpoint=True, mlp_chunk=1024, residual=torch.bfloat16)

LADDER: tuple[Rung, ...] = (
    Rung("standard attention, float32", _TEXTBOOK),
    Rung("+ bfloat16 autocast", _TEXTBOOK, torch.bfloat16),
    Rung("+ FlashAttention", _FLASH, torch.bfloat16),
    Rung("+ loss in chunks", _LOSS, torch.bfloat16),
    Rung("+ checkpointing", _CHECKPOINT, torch.bfloat16),
    Rung("+ MLP in chunks", _MLP, torch.bfloat16),
    Rung("+ bfloat16 stream", _RESIDUAL, torch.bfloat16),
)


def longest(config: DecoderConfig, limit: int | str, *, multiple: int = 256, **options: Any) -> int:
    """The longest sequence whose step keeps to a limit, by the plan.

    Args:
        limit: bytes, or a text such as "16GiB".
        multiple: of which the length is one.
        options: as for `plan_memory`, without seqlen and limit.

    Returns:
        Tokens; 0 if not even `multiple` tokens fit. Learned positions end it at max_positions.

    Raises:
        ValueError: multiple below 1; what `plan_memory` refuses.
    """
    if multiple < 1:
        raise ValueError(f"multiple is {multiple}, but must be at least 1.")
    bound = parse_bytes(limit)
    # Each token takes an embedding at least: no sequence longer than this fits.
    most = bound // (4 * config.width)
    if config.positions == "learned":
        most = min(most, config.max_positions)
    fits, too_long = 0, most // multiple + 1
    while too_long - fits > 1:  # memory grows with the length: halve what is between
        middle = (fits + too_long) // 2
        if plan_memory(config, seqlen=middle * multiple, **options).peak_bytes <= bound:
            fits = middle
        else:
            too_long = middle
    return fits * multiple


def what_fits(
    config: DecoderConfig,
    limit: int | str,
    *,
    seqlen: int = 8192,
    ladder: Sequence[Rung] = LADDER,
    **options: Any,
) -> pd.DataFrame:
    """Each remedy on top of those before it: the longest sequence, and the peak of a given one.

    Args:
        limit: bytes, or a text such as "16GiB".
        seqlen: the length whose peak is shown.
        ladder: the remedies.
        options: as for `plan_memory`, without what the ladder decides.

    Returns:
        remedy, longest (tokens), peak_bytes and when (of `seqlen` tokens), fits.
    """
    import pandas as pd

    rows = []
    for rung in ladder:
        chosen: dict[str, Any] = {"savings": rung.savings, "autocast": rung.autocast, **options}
        plan = plan_memory(config, seqlen=seqlen, limit=limit, **chosen)
        rows.append(
            {
                "remedy": rung.name,
                "longest": longest(config, limit, **chosen),
                "peak_bytes": plan.peak_bytes,
                "when": plan.when,
                "fits": plan.fits,
            }
        )
    return pd.DataFrame(rows)
