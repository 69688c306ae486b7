"""What goes wrong behind the forward pass: losses, gradients, updates.

Each function returns a table whose first column names the variants, the failing one first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labsupport.attention.accuracy import relative_error
from labsupport.precision.dtypes import short

if TYPE_CHECKING:
    import pandas as pd

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def cross_entropy_dtypes(tokens: int = 512, vocabulary: int = 50_257) -> pd.DataFrame:
    """The loss of float16 logits is coarse, and most of its gradient is zero.

    The gradient of a logit is (p - 1[target]) / tokens, and its rows sum to zero. With a large
    vocabulary p / tokens is below float16's smallest subnormal, 6e-8: what pulls wrong tokens down
    is gone, what pulls the right one up is not.

    Returns:
        logits, loss, loss error (against float64 on the same logits), zero gradients (share), row
        sum (the largest |sum| of a row over 1 / tokens, the pull on its target; should be 0).
    """
    generator = _seed()
    logits = 2 * torch.randn(tokens, vocabulary, generator=generator)
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    rows = []
    for name, dtype, compute in (
        ("float16", F16, F16),
        ("bfloat16", BF16, BF16),
        ("float16, loss in float32", F16, F32),
        ("float32", F32, F32),
    ):
        given = logits.to(dtype)
        leaf = given.to(compute).requires_grad_()
        loss = F.cross_entropy(leaf, labels)
        loss.backward()
        exact = F.cross_entropy(given.double(), labels).item()
        assert leaf.grad is not None
        rows.append(
            {
                "logits": name,
                "loss": loss.item(),
                "loss error": abs(loss.item() - exact),
                "zero gradients": (leaf.grad == 0).float().mean().item(),
                "row sum": leaf.grad.sum(-1, dtype=torch.float64).abs().max().item() * tokens,
            }
        )
    return _table(rows)


def gradient_underflow(scales: Sequence[float] = (1.0, 2.0**10, 2.0**16)) -> pd.DataFrame:
    """Small gradients vanish in float16, and a scaled loss brings them back.

    Two linear layers (256 -> 256 -> 256) on 512 tokens in float16. The gradient that arrives from
    above has entries of about 2e-8: p / tokens for 1,000 tokens and a vocabulary of 50,000.

    Returns:
        loss scale, zero gradients (share of the first layer's weights), relative error of that
        gradient, after division by the scale.
    """
    generator = _seed()
    x = torch.randn(512, 256, generator=generator)
    weights = [torch.randn(256, 256, generator=generator) / 16 for _ in range(2)]
    above = torch.randn(512, 256, generator=generator) * 2e-8
    exact = _first_layer_gradient(x, weights, above, torch.float64, 1.0)
    rows = []
    for dtype, scale in [*((F16, scale) for scale in scales), (BF16, 1.0)]:
        got = _first_layer_gradient(x, weights, above, dtype, scale)
        rows.append(
            {
                "dtype": short(dtype),
                "loss scale": scale,
                "zero gradients": (got == 0).float().mean().item(),
                "relative error": relative_error(got.double() / scale, exact),
            }
        )
    return _table(rows)


def vanishing_updates(learning_rate: float = 1e-3, steps: int = 100) -> pd.DataFrame:
    """Steps of less than half a unit in the last place leave low-precision weights where they are.

    AdamW with a constant gradient moves each weight by `learning_rate` a step; weights start at 1.

    Returns:
        weights, moved (distance after all steps), expected, lost (share).
    """
    expected = learning_rate * steps
    rows = []
    for name, dtype, master in (
        ("bfloat16", BF16, False),
        ("bfloat16, float32 master copy", BF16, True),
        ("float32", F32, False),
    ):
        weight = torch.ones(64, dtype=dtype)
        updated = weight.float() if master else weight
        parameter = torch.nn.Parameter(updated)
        optimizer = torch.optim.AdamW([parameter], lr=learning_rate, weight_decay=0.0)
        for _ in range(steps):
            parameter.grad = torch.full_like(parameter, 0.1)
            optimizer.step()
        moved = 1 - parameter.detach().to(dtype).float().mean().item()
        rows.append(
            {
                "weights": name,
                "moved": moved,
                "expected": expected,
                "lost": max(0.0, 1 - moved / expected),
            }
        )
    return _table(rows)


def embedding_updates(
    learning_rates: Sequence[float] = (1e-3, 1e-4, 2e-5), spread: float = 0.02
) -> pd.DataFrame:
    """How many entries of an embedding table do not move in one Adam step, by dtype and rate.

    Entries are normal with standard deviation `spread` (GPT-2's initialisation); the step of each
    entry is the learning rate, as in Adam's first step.

    Returns:
        table, learning rate, unmoved (share of the entries).
    """
    weight = spread * torch.randn(1000, 64, generator=_seed())
    rows = []
    for dtype in (BF16, F32):
        for rate in learning_rates:
            before = weight.to(dtype)
            rows.append(
                {
                    "table": short(dtype),
                    "learning rate": rate,
                    "unmoved": (before - rate == before).float().mean().item(),
                }
            )
    return _table(rows)


def _first_layer_gradient(
    x: Tensor, weights: Sequence[Tensor], above: Tensor, dtype: torch.dtype, scale: float
) -> Tensor:
    """Gradient of the first of two linear layers in `dtype`, for a loss that was scaled."""
    first, second = (w.to(dtype).requires_grad_() for w in weights)
    out = (x.to(dtype) @ first) @ second
    out.backward((above.double() * scale).to(dtype))
    assert first.grad is not None
    return first.grad


def _seed(value: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(value)


def _table(rows: Any) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(list(rows))
