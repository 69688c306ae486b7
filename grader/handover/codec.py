"""Values as bytes, and back, for two processes of which one must not trust the other.

A frame is a magic word, the length of a header, the header in JSON, and the raw bytes of tensors
and arrays. Nothing in it names code: what a frame holds is built from a short list of kinds, each
of which is checked before it is built. A value of another kind arrives as a `Foreign`: an empty
object whose class has the same name, so that a message can say what came back.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from grader.handover.encoding import (
    ALIGN,
    DTYPES,
    MAGIC,
    MAX_BYTES,
    MAX_DEPTH,
    MAX_HEADER,
    MAX_NODES,
    MAX_TEXT,
    Encoder,
    Foreign,
    HandoverError,
    Resolve,
    dense_span,
    is_plain,
)

__all__ = [
    "DTYPES",
    "MAGIC",
    "MAX_BYTES",
    "MAX_HEADER",
    "Foreign",
    "HandoverError",
    "decode",
    "dense_span",
    "encode",
    "frame_sizes",
]


def encode(
    value: Any, *, refer: Resolve | None = None, limit: int = MAX_BYTES, compact: bool = True
) -> list[Any]:
    """A value as the buffers of a frame; tensors are not copied if they lie dense in memory.

    Args:
        value: None, bool, int, float, str, tuple, list, dict with str keys, range, slice, Tensor,
            NumPy array or number, torch.dtype, torch.device, DataFrame, Series, an attention layer
            (its plain attributes), a FlashAttentionConfig. Anything else arrives as a `Foreign`.
        refer: asked first of every tensor and of what has no kind; returns a node ("kind", ...)
            to stand for it, or None.
        limit: of the bytes of tensors and arrays.
        compact: whether a tensor with wide gaps in memory is sent without them. Without `compact`
            a tensor always keeps its strides.

    Raises:
        HandoverError: too large, too deep.
    """
    encoder = Encoder(refer, limit, compact)
    try:
        header = json.dumps(encoder.node(value, 0), separators=(",", ":")).encode()
    except (ValueError, RecursionError) as error:
        raise HandoverError(f"a value that cannot be handed over: {error}") from None
    if len(header) > MAX_HEADER:
        raise HandoverError("a value with too many parts to be handed over")
    start = MAGIC + struct.pack(">II", len(header), encoder.size)
    padding = bytes(-(len(start) + len(header)) % ALIGN)
    return [start + header + padding, *encoder.buffers]


def decode(frame: bytearray, *, resolve: Resolve | None = None) -> Any:
    """The value of a frame; its tensors use the frame's memory.

    Args:
        frame: the whole frame. It is trusted in nothing.
        resolve: for kinds that `encode`'s refer made: called with the kind and the node's content.

    Raises:
        HandoverError: it is no frame.
    """
    return _Decoder(frame, resolve).value()


def frame_sizes(start: bytes) -> int:
    """Bytes of a whole frame, from its first 12.

    Raises:
        HandoverError: it is no frame, or too large.
    """
    if len(start) != 12 or start[:4] != MAGIC:
        raise HandoverError("no frame")
    header, body = struct.unpack(">II", start[4:])
    if header > MAX_HEADER:
        raise HandoverError("a frame that is too large")
    return _body_start(header) + body


def _body_start(header: int) -> int:
    return -(-(12 + header) // ALIGN) * ALIGN


class _Decoder:
    def __init__(self, frame: bytearray, resolve: Resolve | None) -> None:
        self.resolve, self.nodes = resolve, 0
        if frame_sizes(bytes(frame[:12])) != len(frame):
            raise HandoverError("a frame of another length than it says")
        header, _ = struct.unpack(">II", frame[4:12])
        self.frame, self.body = frame, _body_start(header)
        try:
            self.tree = json.loads(bytes(frame[12 : 12 + header]))
        except (ValueError, RecursionError):
            raise HandoverError("a frame without a readable header") from None

    def value(self) -> Any:
        try:
            return self.build(self.tree, 0)
        except HandoverError:
            raise
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError,
                OverflowError, MemoryError) as error:  # fmt: skip
            raise HandoverError(f"a value that cannot be built ({type(error).__name__})") from None

    def build(self, node: Any, depth: int) -> Any:
        self.nodes += 1
        if depth > MAX_DEPTH or self.nodes > MAX_NODES:
            raise HandoverError("a value with too many parts")
        if node is None or isinstance(node, bool | int):
            return node
        if isinstance(node, str):
            if len(node) > MAX_TEXT:
                raise HandoverError("a text that is too long")
            return node.encode("utf-8", "replace").decode()
        if not isinstance(node, list) or len(node) != 2 or not isinstance(node[0], str):
            raise HandoverError("a value of no known kind")
        kind, content = node
        builder = getattr(self, f"build_{kind}", None) if kind in KINDS else None
        if builder is not None:
            return builder(content, depth + 1)
        if self.resolve is None:
            raise HandoverError("a value of no known kind")
        return self.resolve(kind, content)

    def build_float(self, content: Any, depth: int) -> float:
        return float.fromhex(content)

    def build_tuple(self, content: Any, depth: int) -> tuple[Any, ...]:
        return tuple(self.build_list(content, depth))

    def build_list(self, content: Any, depth: int) -> list[Any]:
        if not isinstance(content, list):
            raise HandoverError("a list that is none")
        return [self.build(one, depth) for one in content]

    def build_dict(self, content: Any, depth: int) -> dict[str, Any]:
        made = {}
        for key, one in content:
            if not isinstance(key, str):
                raise HandoverError("a key that is no text")
            made[key] = self.build(one, depth)
        return made

    def build_range(self, content: Any, depth: int) -> range:
        return range(*(_whole(one, -(2**62)) for one in content))

    def build_slice(self, content: Any, depth: int) -> slice:
        start, stop, step = (self.build(one, depth) for one in content)
        return slice(start, stop, step)

    def build_dtype(self, content: Any, depth: int) -> torch.dtype:
        return DTYPES[content]

    def build_device(self, content: Any, depth: int) -> torch.device:
        return torch.device(content if content in ("cpu", "cuda", "meta") else "cpu")

    def build_number(self, content: Any, depth: int) -> Any:
        return self.build_array(content, depth)[()]

    def build_array(self, content: Any, depth: int) -> np.ndarray:
        name, shape, start, size = content
        dtype = np.dtype(_text(name))
        if dtype.kind not in "biuf":
            raise HandoverError("an array of no known dtype")
        shape = tuple(_whole(n) for n in shape)
        if math.prod(shape) * dtype.itemsize != size:
            raise HandoverError("an array of another size than it says")
        if size == 0:
            return np.empty(shape, dtype)
        if dtype.kind == "b":
            return (np.frombuffer(self.bytes_at(start, size), np.uint8) != 0).reshape(shape)
        return np.frombuffer(self.bytes_at(start, size), dtype).reshape(shape)

    def build_tensor(self, content: Any, depth: int) -> Tensor:
        name, shape, stride, start, size, requires_grad = content
        dtype = DTYPES[_text(name)]
        shape, stride = [_whole(n) for n in shape], [_whole(n) for n in stride]
        if len(shape) != len(stride) or len(shape) > 64:
            raise HandoverError("a tensor of no shape")
        count = math.prod(shape)
        if count * dtype.itemsize > max(MAX_BYTES, len(self.frame)):
            raise HandoverError("a tensor that is too large")
        if count == 0:
            made = torch.empty(shape, dtype=dtype)
        else:
            span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
            if span * dtype.itemsize != size:
                raise HandoverError("a tensor of another size than it says")
            raw = torch.frombuffer(self.bytes_at(start, size), dtype=torch.uint8)
            flat = raw.ne(0) if dtype == torch.bool else raw.view(dtype)
            made = flat.as_strided(shape, stride)
        if requires_grad is True and (dtype.is_floating_point or dtype.is_complex):
            made = made.detach().requires_grad_()
        return made

    def bytes_at(self, start: Any, size: Any) -> memoryview:
        start, size = _whole(start), _whole(size)
        if start % ALIGN or self.body + start + size > len(self.frame):
            raise HandoverError("bytes that are not there")
        return memoryview(self.frame)[self.body + start : self.body + start + size]

    def build_module(self, content: Any, depth: int) -> nn.Module:
        name, attributes = content
        module = type(_name(name), (nn.Module,), {})()
        for key, value in self.build(attributes, depth).items():
            if is_plain(value) and key.isidentifier() and key[:1] != "_":
                module.__dict__[key] = value
        return module

    def build_policy(self, content: Any, depth: int) -> Any:
        import warnings

        from labsupport.precision import FlashAttentionConfig

        fields = self.build(content, depth)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return FlashAttentionConfig(**fields)

    def build_frame(self, content: Any, depth: int) -> Any:
        import pandas as pd

        names, index, columns = content
        index = self.column(index, depth)
        made = {_text(name): self.column(column, depth)
                for name, column in zip(names, columns, strict=True)}  # fmt: skip
        return pd.DataFrame(made, index=index)

    def build_series(self, content: Any, depth: int) -> Any:
        import pandas as pd

        index, column = content
        return pd.Series(self.column(column, depth), index=self.column(index, depth))

    def column(self, content: Any, depth: int) -> Any:
        import pandas as pd

        dtype, values = content
        if dtype == "array":
            return self.build_array(values, depth).copy()
        made = self.build_list(values, depth)
        if not all(one is None or isinstance(one, bool | int | float | str) for one in made):
            raise HandoverError("a column of no known values")
        return pd.array(made, dtype="str") if dtype == "str" else np.array(made, dtype=object)

    def build_foreign(self, content: Any, depth: int) -> Foreign:
        name, own = content
        made = type(_name(name), (Foreign,), {})()
        if own:
            made.__name__ = _name(own)  # type: ignore[attr-defined]
        return made


KINDS = frozenset(name[6:] for name in vars(_Decoder) if name.startswith("build_"))


def _whole(value: Any, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**62:
        raise HandoverError("a size that is none")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise HandoverError("a name that is no text")
    return value


def _name(value: Any) -> str:
    """A type's name, for messages."""
    name = "".join(c if c.isalnum() or c in "_<>." else "_" for c in _text(value)[:80])
    return name or "object"
