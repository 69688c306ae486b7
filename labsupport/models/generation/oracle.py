"""A prompt's logits as they should be: the same model, computed far more exactly."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from labsupport.models.generation.prompts import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

POSITIONS = 256  # the logits of all positions of a long prompt would not fit


@torch.inference_mode()
def prompt_logits(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Logits of the prompt's last POSITIONS positions, on the CPU: (positions, vocabulary)."""
    keep = min(batch.width, POSITIONS)
    return model(batch.ids, use_cache=False, logits_to_keep=keep).logits[0].double().cpu()


def oracle_logits(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, str]:
    """`prompt_logits` of the model as exactly as this device can, and in words how that was."""
    wide = torch.float64
    if model.device.type == "cuda" and model.dtype in (torch.float16, torch.bfloat16):
        wide = torch.float32  # exact enough to judge 16 bits, and fast on every GPU
    name = str(wide).removeprefix("torch.")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # no TF32
    try:
        copied, kept = widened(model, wide)
        but = f" (but {', '.join(kept)} in float32)" if kept else ""
        return prompt_logits(copied, batch), f"the model in {name}{but}"
    finally:
        torch.set_float32_matmul_precision(before)


def widened(model: Any, dtype: torch.dtype) -> tuple[PreTrainedModel, list[str]]:
    """A copy of the model that computes in `dtype` throughout, by textbook attention.

    And the classes of norms that do not: Transformers' RMSNorms compute in float32 whatever they
    are given. PyTorch's takes the place of those that it agrees with.
    """
    from labsupport.models.integration.select import set_attention

    wide, kept = copy.deepcopy(model).to(dtype), set()
    set_attention(wide, "standard")
    for module in list(wide.modules()):
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm") and type(child) is not nn.RMSNorm:
                norm = same_norm(child)
                if norm is None:
                    kept.add(type(child).__name__)
                else:
                    setattr(module, name, norm)
    return wide, sorted(kept)


@torch.no_grad()
def same_norm(norm: Any) -> nn.RMSNorm | None:
    """PyTorch's RMSNorm, in the weight's dtype, if it computes what this norm does; else None.

    By trial, on float32 rows of which some are so small that eps matters. A few models store a
    weight less 1.
    """
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    weight = getattr(norm, "weight", None)
    if eps is None or weight is None:
        return None
    rows = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0))
    rows = (rows * torch.tensor([[1.0], [10.0], [1e-2], [1e-3]])).to(weight.device)
    for offset in (0.0, 1.0):
        same = nn.RMSNorm(weight.shape, eps=eps, device=weight.device, dtype=weight.dtype)
        same.weight.copy_(weight + offset)
        try:
            given, ours = (copy.deepcopy(one).float()(rows) for one in (norm, same))
            if torch.allclose(ours, given, rtol=1e-5, atol=1e-5):
                return same
        except (TypeError, ValueError, RuntimeError):
            return None  # it takes, or gives, something else
    return None
