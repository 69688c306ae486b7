"""Layers whose weights, arithmetic and output may have different dtypes.

    MixedPrecisionLayerNorm   statistics in float32, weights in any dtype, output in the input's
    MixedPrecisionRMSNorm     the same, without a mean
    MixedPrecisionEmbedding   a table in one dtype, its rows handed out in another
    MixedPrecisionLinear      a matmul in one dtype, with a weight that is kept in another

Each is a subclass of PyTorch's layer with the same parameters under the same names, so that a state
dict of the one loads into the other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labsupport.precision.dtypes import short


class MixedPrecisionLayerNorm(nn.LayerNorm):
    """LayerNorm with its statistics in float32, whatever its weights and its input are in.

    What this is needed for, and what not. PyTorch's own `layer_norm` already adds up bfloat16 and
    float16 inputs in float32 inside, and rounds once, at the end: if the weights have the input's
    dtype, this layer calls it and nothing else. It adds three things:

    * on a CPU, 16-bit inputs are copied to float32 first: there PyTorch's backward pass adds up the
      gradients of weight and bias, over all tokens, in 16 bits;
    * weights in another dtype than the input, which PyTorch may refuse or promote;
    * `statistics=torch.float16`, to see what a hand-written LayerNorm would do: the square of a
      deviation overflows from 256 (256² = 65,536 > 65,504), the variance is infinite, and the
      output 0.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device: as in `nn.LayerNorm`.
        statistics: dtype of mean, variance and normalised values.
        dtype: dtype of the weights.

    Shapes: (..., *normalized_shape) to the same, in the input's dtype.
    """

    statistics: torch.dtype

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        statistics: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self.statistics = statistics

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (..., *normalized_shape); returns the input's dtype."""
        arguments = (self.weight, self.bias)
        exact = not (input.device.type == "cpu" and _is_half(input.dtype))
        if exact and _adds_up_in_float32(input, self.statistics, arguments):
            out = F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
            return out.to(input.dtype)
        x = input.to(self.statistics)
        weight, bias = (_to(tensor, self.statistics) for tensor in arguments)
        if _is_half(self.statistics):
            dims = _last_dims(self.normalized_shape)
            centred = x - x.mean(dims, keepdim=True)
            variance = (centred * centred).mean(dims, keepdim=True)
            out = _scale(centred * torch.rsqrt(variance + self.eps), weight, bias)
        else:
            out = F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)
        return out.to(input.dtype)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"{super().extra_repr()}, statistics={short(self.statistics)}"


class MixedPrecisionRMSNorm(nn.RMSNorm):
    """RMSNorm with its mean square in float32, whatever its weights and its input are in.

    Args:
        normalized_shape, elementwise_affine, device: as in `nn.RMSNorm`.
        eps: added to the mean square; None means the epsilon of `statistics`.
        statistics: dtype of the mean square and of the normalised values. In float16, entries from
            256 overflow.
        dtype: dtype of the weights.

    Shapes: (..., *normalized_shape) to the same, in the input's dtype.
    """

    statistics: torch.dtype

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        *,
        statistics: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self.statistics = statistics

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (..., *normalized_shape); returns the input's dtype."""
        eps = torch.finfo(self.statistics).eps if self.eps is None else self.eps
        high = x.to(self.statistics)
        weight = _to(self.weight, self.statistics)
        if _is_half(self.statistics):
            mean_square = (high * high).mean(_last_dims(self.normalized_shape), keepdim=True)
            out = _scale(high * torch.rsqrt(mean_square + eps), weight, None)
        else:
            out = F.rms_norm(high, self.normalized_shape, weight, eps)
        return out.to(x.dtype)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"{super().extra_repr()}, statistics={short(self.statistics)}"


class MixedPrecisionEmbedding(nn.Embedding):
    """An embedding whose table has one dtype and whose output has another.

    There are two strategies: a table in low precision, or a table in float32 whose rows are rounded
    when they leave. Both give the same output, bit for bit: rounding and looking up may change
    places. What differs is the training:

    * the low-precision table needs half the memory, and a float32 master copy to learn from small
      updates (`MixedPrecisionOptimizer` keeps one);
    * the gradient of a row adds up what all occurrences of its token contribute, in the table's
      dtype. On a CPU a token that occurs 1,000 times with a gradient of 1 gets 256 in bfloat16
      (257 is not a bfloat16 number) and 1,000 in float32.

    Args:
        num_embeddings, embedding_dim and options: as in `nn.Embedding`; `dtype` is the table's.
        output_dtype: dtype of what it returns; None means the table's.

    Shapes: integers (...) to (..., embedding_dim).
    """

    output_dtype: torch.dtype | None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        output_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, **options)
        self.output_dtype = output_dtype

    def forward(self, input: Tensor) -> Tensor:
        """Look up (...) integers; returns (..., embedding_dim) in `output_dtype`."""
        rows = super().forward(input)
        return rows if self.output_dtype is None else rows.to(self.output_dtype)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        shown = "the table's" if self.output_dtype is None else short(self.output_dtype)
        return f"{super().extra_repr()}, output_dtype={shown}"


class MixedPrecisionLinear(nn.Linear):
    """A linear layer that computes in one dtype and keeps its weight in another.

    Made for an output head that shares a float32 table with the embedding. Where the two dtypes
    differ, each forward pass makes a copy of the weight in `compute_dtype`, which lives until the
    backward pass: vocabulary × width × 2 bytes in bfloat16. The other choice, a matmul in float32,
    makes logits of twice the size, and leaves the fast 16-bit matrix units of a GPU unused.

    Args:
        in_features, out_features, bias, device: as in `nn.Linear`.
        compute_dtype: dtype of the matmul and of the output; None means the weight's.
        dtype: dtype of the weight.

    Shapes: (..., in_features) in any floating dtype to (..., out_features) in `compute_dtype`.
    """

    compute_dtype: torch.dtype | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        compute_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.compute_dtype = compute_dtype

    def forward(self, input: Tensor) -> Tensor:
        """Multiply (..., in_features); returns (..., out_features) in `compute_dtype`."""
        dtype = self.compute_dtype or self.weight.dtype
        return F.linear(input.to(dtype), self.weight.to(dtype), _to(self.bias, dtype))

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        shown = "the weight's" if self.compute_dtype is None else short(self.compute_dtype)
        return f"{super().extra_repr()}, compute_dtype={shown}"


def _adds_up_in_float32(
    x: Tensor, statistics: torch.dtype, arguments: tuple[Tensor | None, ...]
) -> bool:
    """Whether PyTorch's own kernel does what is asked, without a float32 copy of the input."""
    same = all(tensor is None or tensor.dtype == x.dtype for tensor in arguments)
    return same and statistics == torch.float32 and (_is_half(x.dtype) or x.dtype == statistics)


def _is_half(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.bfloat16)


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _last_dims(shape: tuple[int, ...] | torch.Size) -> list[int]:
    return list(range(-len(shape), 0))


def _scale(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias
