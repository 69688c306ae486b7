"""What a frame's kinds are, and how values become nodes of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

MAGIC = b"LH1\n"
ALIGN = 64
MAX_BYTES = 64 * 2**20  # of tensors and arrays in one frame
MAX_HEADER = 8 * 2**20
MAX_DEPTH, MAX_NODES, MAX_TEXT = 24, 200_000, 1_000_000
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"),
        *("complex64", "complex128"),
    )
    if hasattr(torch, name)
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Resolve = Callable[[str, Any], Any]


class HandoverError(Exception):
    """Bytes that are no frame, or a value that is too large for one."""


class Foreign:
    """Stands for a value of a kind that is not handed over; only its type's name is known."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


def dense_span(x: Tensor) -> int:
    """Elements of memory from a strided tensor's first to its last; 0 if it is empty."""
    if x.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))


class Encoder:
    """Builds a frame's header, node by node, and collects the bytes of its body."""

    def __init__(self, refer: Resolve | None, limit: int, compact: bool) -> None:
        self.refer, self.limit, self.compact = refer, limit, compact
        self.buffers: list[Any] = []
        self.size, self.nodes = 0, 0

    def node(self, value: Any, depth: int) -> Any:
        """A value as a node; see `codec.encode`."""
        self.nodes += 1
        if depth > MAX_DEPTH or self.nodes > MAX_NODES:
            raise HandoverError("a value with too many parts to be handed over")
        if value is None or value is True or value is False:
            return value
        if isinstance(value, np.generic):
            return ["number", self._array(np.asarray(value))] if value.dtype.kind in "biuf" else (
                self._foreign(value)
            )  # fmt: skip
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return ["float", float(value).hex()]
        if isinstance(value, str):
            if len(value) > MAX_TEXT:
                raise HandoverError("a text that is too long to be handed over")
            return str.__str__(value)
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, tuple | list):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return [kind, [self.node(one, depth + 1) for one in value]]
        if isinstance(value, dict) and all(type(key) is str for key in value):
            return ["dict", [[key, self.node(one, depth + 1)] for key, one in value.items()]]
        return self._rare(value, depth)

    def _rare(self, value: Any, depth: int) -> Any:
        if isinstance(value, range):
            return ["range", [value.start, value.stop, value.step]]
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return ["slice", [self.node(one, depth + 1) for one in parts]]
        if isinstance(value, torch.dtype):
            return ["dtype", DTYPE_NAMES[value]] if value in DTYPE_NAMES else self._foreign(value)
        if isinstance(value, torch.device):
            return ["device", value.type]
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            return ["array", self._array(value)]
        if isinstance(value, nn.Module):
            plain = {k: v for k, v in vars(value).items() if is_plain(v) and k[:1] != "_"}
            return ["module", [type(value).__name__, self.node(plain, depth + 1)]]
        known = _known(value)
        if known == "policy":
            fields = {name: getattr(value, name) for name in value.__dataclass_fields__}
            return ["policy", self.node(fields, depth + 1)]
        if known == "frame" and all(type(name) is str for name in value.columns):
            columns = [self._column(value[name], depth) for name in value.columns]
            index = self._column(value.index, depth)
            return ["frame", [list(value.columns), index, columns]]
        if known == "series":
            return ["series", [self._column(value.index, depth), self._column(value, depth)]]
        if self.refer is not None and (made := self.refer("object", value)) is not None:
            return made
        return self._foreign(value)

    def _column(self, column: Any, depth: int) -> Any:
        """A column or an index: numbers as an array, anything else one by one."""
        numbers = isinstance(column.dtype, np.dtype) and column.dtype.kind in "biuf"
        if numbers:
            return ["array", self._array(column.to_numpy())]
        return [str(column.dtype), [self.node(one, depth + 1) for one in column.tolist()]]

    def _foreign(self, value: Any) -> Any:
        name = value.__name__ if isinstance(value, type) else ""
        return ["foreign", [type(value).__name__[:80], name[:80]]]

    def _array(self, value: np.ndarray) -> list[Any]:
        value = np.ascontiguousarray(value).reshape(value.shape)
        where = self._raw(value.reshape(-1).view(np.uint8).data)
        return [value.dtype.newbyteorder("<").str, list(value.shape), *where]

    def _tensor(self, x: Tensor) -> Any:
        if self.refer is not None and (made := self.refer("tensor", x)) is not None:
            return made
        if x.layout != torch.strided or x.device.type == "meta" or x.dtype not in DTYPE_NAMES:
            return self._foreign(x)
        data = x.detach().resolve_conj().resolve_neg().cpu()
        if type(data) is not Tensor:
            data = data.as_subclass(Tensor)
        span = dense_span(data)
        if self.compact and span > data.numel() * 4:
            data = data.contiguous()
            span = data.numel()
        if data.numel() * data.element_size() > self.limit:
            raise HandoverError(f"a tensor of shape {tuple(x.shape)} is too large to hand over")
        flat = data.as_strided((span,), (1,))
        where = self._raw(flat.view(torch.uint8).numpy().data)
        name, shape = DTYPE_NAMES[x.dtype], list(data.shape)
        return ["tensor", [name, shape, list(data.stride()), *where, x.requires_grad]]

    def _raw(self, data: memoryview) -> tuple[int, int]:
        """Where the bytes will stand in the body, and how many there are."""
        if data.nbytes == 0:
            return 0, 0
        start = self.size
        if start + data.nbytes > self.limit:
            raise HandoverError("a value that is too large to be handed over")
        self.buffers.append(data)
        if padding := -data.nbytes % ALIGN:
            self.buffers.append(bytes(padding))
        self.size += data.nbytes + padding
        return start, data.nbytes


def _known(value: Any) -> str | None:
    """Kinds of packages that need not be imported: if they are not, the value is none of theirs."""
    import sys

    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(value, pandas.DataFrame):
        return "frame"
    if pandas is not None and isinstance(value, pandas.Series):
        return "series"
    policy = sys.modules.get("labsupport.precision.policy")
    if policy is not None and isinstance(value, policy.FlashAttentionConfig):
        return "policy"
    return None


def is_plain(value: Any) -> bool:
    """Whether it is None, a bool, a number of Python or a text."""
    return value is None or isinstance(value, bool | int | float | str)
