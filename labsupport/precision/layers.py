"""Layers whose weights, arithmetic and output may have different dtypes.

    MixedPrecisionLayerNorm   statistics in float32, weights in any dtype, output in the input's
    MixedPrecisionRMSNorm     the same, without a mean
    MixedPrecisionEmbedding   a table in one dtype, its rows returned in another
    MixedPrecisionLinear      a matmul in one dtype, with a weight stored in another

Each is a subclass of PyTorch's layer with the same parameters under the same names, so that a state
dict of the one loads into the other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_HALF = (torch.float16, torch.bfloat16)


class _Norm(nn.Module):
    """Common part of the norms: the dtype of their statistics, which is a further option."""

    statistics: torch.dtype

    def __init__(self, *args: Any, statistics: torch.dtype = torch.float32, **options: Any) -> None:
        super().__init__(*args, **options)
        self.statistics = statistics


class MixedPrecisionLayerNorm(_Norm, nn.LayerNorm):
    """LayerNorm with its statistics in float32, for weights and inputs of any dtypes.

    PyTorch's own `layer_norm` already adds up 16-bit inputs in float32 and rounds once. This layer
    calls it, and adds: on a CPU a copy of 16-bit inputs to float32 (PyTorch's backward pass
    adds up the gradients of weight and bias in 16 bits there); weights in another dtype than the
    input; and `statistics=torch.float16`, to see the failure of a hand-written LayerNorm: squares
    overflow from 256 (256² = 65,536 > 65,504), the variance is infinite, and the output 0.

    Args:
        normalized_shape, options: as in `nn.LayerNorm`; `dtype` is the weights'.
        statistics: dtype of mean, variance and normalised values.

    Shapes: `(..., *normalized_shape)` to the same, in the input's dtype.

    >>> norm = MixedPrecisionLayerNorm(8, dtype=torch.float32)
    >>> norm(torch.randn(2, 8, dtype=torch.bfloat16)).dtype
    torch.bfloat16
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `(..., *normalized_shape)`; return the input's dtype."""
        weight, bias, high = self.weight, self.bias, self.statistics
        same = all(w is None or w.dtype == input.dtype for w in (weight, bias))
        if same and high == torch.float32 and input.dtype in _HALF and input.device.type != "cpu":
            return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)
        x, weight, bias = input.to(high), _to(weight, high), _to(bias, high)
        if high in _HALF:
            dims = list(range(-len(self.normalized_shape), 0))
            x = x - x.mean(dims, keepdim=True)
            x = x * torch.rsqrt((x * x).mean(dims, keepdim=True) + self.eps)
            x = x if weight is None else x * weight
            x = x if bias is None else x + bias
        else:
            x = F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)
        return x.to(input.dtype)


class MixedPrecisionRMSNorm(_Norm, nn.RMSNorm):
    """RMSNorm with its mean square in float32, for weights and inputs of any dtypes.

    Args:
        normalized_shape, options: as in `nn.RMSNorm`; `dtype` is the weights'. `eps=None` means the
            epsilon of `statistics`.
        statistics: dtype of the mean square and of the normalised values. In float16, entries from
            256 overflow.

    Shapes: `(..., *normalized_shape)` to the same, in the input's dtype.

    >>> norm = MixedPrecisionRMSNorm(8, dtype=torch.float32)
    >>> norm(torch.randn(2, 8, dtype=torch.bfloat16)).dtype
    torch.bfloat16
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `(..., *normalized_shape)`; return the input's dtype."""
        eps = torch.finfo(self.statistics).eps if self.eps is None else self.eps
        high, weight = x.to(self.statistics), _to(self.weight, self.statistics)
        if self.statistics in _HALF:
            dims = list(range(-len(self.normalized_shape), 0))
            out = high * torch.rsqrt((high * high).mean(dims, keepdim=True) + eps)
            out = out if weight is None else out * weight
        else:
            out = F.rms_norm(high, self.normalized_shape, weight, eps)
        return out.to(x.dtype)


class MixedPrecisionEmbedding(nn.Embedding):
    """An embedding whose table has one dtype and whose output has another.

    A table in low precision, and a table in float32 whose rows are rounded on output, give the same
    output, bit for bit. In training, the former needs half the memory and a float32 master copy
    (`MixedPrecisionOptimizer`), and adds up a row's gradient in its own dtype: on a CPU a token
    that occurs 1,000 times with a gradient of 1 gets 256 in bfloat16 (257 is no bfloat16 number).

    Args:
        num_embeddings, embedding_dim, options: as in `nn.Embedding`; `dtype` is the table's.
        output_dtype: dtype of the output; None means the table's.

    Shapes: integers (...) to (..., embedding_dim).

    >>> table = MixedPrecisionEmbedding(10, 4, dtype=torch.float32, output_dtype=torch.bfloat16)
    >>> table(torch.tensor([1, 2])).dtype
    torch.bfloat16
    """

    output_dtype: torch.dtype | None

    def __init__(self, *args: Any, output_dtype: torch.dtype | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.output_dtype = output_dtype

    def forward(self, input: Tensor) -> Tensor:
        """Look up (...) integers; return (..., embedding_dim) in `output_dtype`."""
        rows = super().forward(input)
        return rows.to(self.output_dtype or rows.dtype)


class MixedPrecisionLinear(nn.Linear):
    """A linear layer that computes in one dtype and stores its weight in another.

    Made for an output head that shares a float32 table with the embedding. If the two dtypes
    differ, each forward pass makes a copy of the weight in `compute_dtype`, which lives until the
    backward pass: vocabulary × width × 2 bytes in bfloat16.

    Args:
        in_features, out_features, options: as in `nn.Linear`; `dtype` is the weight's.
        compute_dtype: dtype of the matmul and of the output; None means the weight's.

    Shapes: (..., in_features) in any floating dtype to (..., out_features) in `compute_dtype`.
    """

    compute_dtype: torch.dtype | None

    def __init__(
        self, *args: Any, compute_dtype: torch.dtype | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.compute_dtype = compute_dtype

    def forward(self, input: Tensor) -> Tensor:
        """Multiply (..., in_features); return (..., out_features) in `compute_dtype`."""
        dtype = self.compute_dtype or self.weight.dtype
        return F.linear(input.to(dtype), self.weight.to(dtype), _to(self.bias, dtype))


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
