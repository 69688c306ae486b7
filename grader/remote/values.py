"""Values as bytes and back, for two processes of which one must not trust the other.

A frame is a header in JSON, and the memory of its tensors in the safetensors format: one flat
tensor each, of which the header says dtype, shape and stride. Nothing in a frame names code: each
value is of one of few kinds, and checked before it is built.
"""

import json
import math
import socket
import struct
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

MAX_BYTES = 2**30  # of a frame from the grader
MAX_REPLY = 72 * 2**20  # of a frame from the sandbox
MAX_HEADER = 4 * 2**20
MAX_DEPTH, MAX_NODES, MAX_TEXT = 24, 20_000, 1_000_000
_NAMES = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8"
DTYPES = {name: getattr(torch, name) for name in [*_NAMES.split(), "bool"]}
Refer = Callable[[Any], Any]
Frame = tuple[bytes, bytes]  # header; tensors


class FrameError(Exception):
    """Invalid bytes, or a value too large for a frame."""


class Foreign:
    """Placeholder for a value that cannot be sent; only its type's name is known."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


def pack(value: Any, refer: Refer | None = None, limit: int = MAX_BYTES) -> Frame:
    """Return the frame of a value.

    It may hold None, bool, int, float, str, tuple, list, dict with str keys, Tensor, NumPy array or
    number, torch.dtype, DataFrame, an attention layer (its plain attributes), FlashAttentionConfig;
    anything else arrives as a `Foreign`. Of tensors and of values without a kind, `refer` is asked
    first, for a node [kind, content] that stands for the value, or None.

    Raises:
        FrameError: the value is too large, or has too many parts.
    """
    packer = _Packer(refer, limit)
    try:
        header = json.dumps(packer.node(value, 0), separators=(",", ":")).encode()
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a value that cannot travel: {error}") from None
    if len(header) > MAX_HEADER:
        raise FrameError("a value with too many parts")
    return header, safetensors.torch.save(packer.flats)


def unpack(frame: Frame, resolve: Callable[[str, Any], Any] | None = None) -> Any:
    """Return the value of a frame; raise FrameError if it is no frame.

    `resolve` is called with kind and content of the nodes that `pack`'s `refer` made.
    """
    try:
        header, body = frame
        return _Unpacker(safetensors.torch.load(body), resolve).build(json.loads(header))
    except FrameError:
        raise
    except Exception as error:  # the parsers expect frames, and fail in many ways
        raise FrameError(f"a value that cannot be built ({type(error).__name__})") from None


def span(x: Tensor) -> int:
    """Return the elements of memory from a strided tensor's first to its last."""
    if x.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))


def graded_in(value: Any) -> list[Tensor]:
    """Return the tensors with requires_grad in tuples, lists and dicts, in a frame's order."""
    return [x for x in tree_leaves(value) if isinstance(x, Tensor) and x.requires_grad]


def is_plain(value: Any) -> bool:
    """Tell whether a value is None, a bool, a number of Python or a text."""
    return value is None or isinstance(value, bool | int | float | str)


class _Packer:
    def __init__(self, refer: Refer | None, limit: int) -> None:
        self.refer, self.limit = refer, limit
        self.flats: dict[str, Tensor] = {}
        self.size = self.nodes = 0

    def node(self, value: Any, depth: int) -> Any:
        self.nodes += 1
        if depth > MAX_DEPTH or self.nodes > MAX_NODES:
            raise FrameError("a value with too many parts")
        if isinstance(value, np.generic | np.ndarray):
            array = np.array(value, order="C")  # a copy: PyTorch wants to be able to write
            if array.dtype.kind in "biuf":
                return ["array", [self.store(torch.from_numpy(array.reshape(-1))), array.shape]]
        elif value is None or isinstance(value, bool):
            return value
        elif isinstance(value, int | float):  # without what a class derived from it adds
            return int(value) if isinstance(value, int) else float(value)
        elif isinstance(value, str):
            if len(value) > MAX_TEXT:
                raise FrameError("a text that is too long")
            return str.__str__(value)
        elif isinstance(value, tuple | list):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return [kind, [self.node(one, depth + 1) for one in value]]
        elif isinstance(value, dict) and all(type(key) is str for key in value):
            return ["dict", [[key, self.node(one, depth + 1)] for key, one in value.items()]]
        elif self.refer is not None and (made := self.refer(value)) is not None:
            return made
        name, dtype = type(value).__name__, str(getattr(value, "dtype", "")).removeprefix("torch.")
        if isinstance(value, Tensor) and dtype in DTYPES:
            if value.layout == torch.strided and value.device.type != "meta":
                return self.tensor(value)
        elif isinstance(value, torch.dtype):
            return ["dtype", str(value).removeprefix("torch.")]
        elif isinstance(value, nn.Module):
            plain = {k: v for k, v in vars(value).items() if is_plain(v) and k[:1] != "_"}
            return ["module", [name, self.node(plain, depth + 1)]]
        # Of packages that need not be imported: where they are not, no value is theirs.
        elif name == "DataFrame" and all(type(one) is str for one in value.columns):
            columns = [value[one].to_numpy() for one in value.columns]
            columns = [c if c.dtype.kind in "biuf" else c.tolist() for c in columns]
            return ["table", [self.node(list(value.columns), depth), self.node(columns, depth + 1)]]
        elif name == "FlashAttentionConfig":
            fields = {one: getattr(value, one) for one in value.__dataclass_fields__}
            return ["policy", [name, self.node(fields, depth + 1)]]
        own = value.__name__ if isinstance(value, type) else ""
        return ["foreign", [name[:80], own[:80]]]

    def tensor(self, x: Tensor) -> Any:
        if x.numel() * x.element_size() > self.limit:  # though it may take four bytes
            raise FrameError("a value that is too large")
        data = x.detach().cpu().as_subclass(Tensor)
        data = data.contiguous() if span(data) > 4 * data.numel() else data  # a sparse one
        # The memory between the first element and the last: strides arrive as they are.
        flat = data.as_strided((span(data),), (1,))
        return ["tensor", [self.store(flat), list(x.shape), list(data.stride()), x.requires_grad]]

    def store(self, flat: Tensor) -> str:
        """Keep a flat tensor; return its name."""
        self.size += flat.nbytes
        if self.size > self.limit:
            raise FrameError("a value that is too large")
        name = str(len(self.flats))
        self.flats[name] = flat.clone()  # the format knows no memory that tensors share
        return name


class _Unpacker:
    def __init__(self, flats: dict[str, Tensor], resolve: Any) -> None:
        self.flats, self.resolve, self.nodes = flats, resolve, 0

    def build(self, node: Any, depth: int = 0) -> Any:
        self.nodes += 1
        if depth > MAX_DEPTH or self.nodes > MAX_NODES:
            raise FrameError("a value with too many parts")
        if node is None or isinstance(node, bool | int | float):
            return node
        if isinstance(node, str):
            return node.encode("utf-8", "replace").decode()
        kind, content = node
        match kind:
            case "list":
                return [self.build(one, depth + 1) for one in content]
            case "tuple":
                return tuple(self.build(one, depth + 1) for one in content)
            case "dict":
                return {_text(key): self.build(one, depth + 1) for key, one in content}
            case "dtype":
                return DTYPES[content]
            case "array":
                name, shape = content
                return self.flats[name].numpy().reshape(shape)[()]
            case "tensor":
                name, shape, stride, requires_grad = content
                made = _strided(self.flats[name], shape, stride)
                return made.requires_grad_(requires_grad is True and made.is_floating_point())
            case "module" | "policy" | "table" | "foreign":
                return _made(kind, *(self.build(one, depth + 1) for one in content))
        if self.resolve is None or not isinstance(kind, str):
            raise FrameError("a value of no known kind")
        return self.resolve(kind, content)


def _made(kind: str, name: Any, content: Any) -> Any:
    """Make a layer, a precision policy, a table, or what stands for a value of another kind."""
    if kind == "policy":
        from labsupport.precision import FlashAttentionConfig

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return FlashAttentionConfig(**content)
    if kind == "table":
        import pandas as pd

        return pd.DataFrame(dict(zip(map(_text, name), content, strict=True)))
    made = type(_name(name), (nn.Module if kind == "module" else Foreign,), {})()
    if kind == "module":
        plain = {k: v for k, v in content.items() if is_plain(v) and k.isidentifier()}
        vars(made).update({k: v for k, v in plain.items() if k[:1] != "_"})
    elif content:
        made.__name__ = _name(content)  # type: ignore[attr-defined]
    return made


def _strided(flat: Tensor, shape: Any, stride: Any) -> Tensor:
    """Return a view of `flat`; raise FrameError beyond its elements, or for many repeats."""
    sizes = [*shape, *stride]
    if not all(type(n) is int and 0 <= n < 2**40 for n in sizes) or len(shape) != len(stride):
        raise FrameError("a tensor of no shape")
    count = math.prod(shape)
    reach = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    if count and (reach > flat.numel() or count > max(4 * flat.numel(), 2**22)):
        raise FrameError("a tensor of another size than it says")
    return flat.as_strided(shape, stride)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise FrameError("a name that is no text")
    return value


def _name(value: Any) -> str:
    """A type's name, for messages."""
    return "".join(c if c.isalnum() or c in "_<>." else "_" for c in _text(value)[:80]) or "object"


def send(connection: socket.socket, frame: Frame) -> None:
    """Send a frame: the lengths of both parts, the header, the tensors."""
    header, body = frame
    connection.sendall(struct.pack(">QQ", len(header), len(body)) + header)
    connection.sendall(body)


def receive(connection: socket.socket, *, limit: int, deadline: float | None = None) -> Frame:
    """Return one whole frame, of at most `limit` bytes of tensors.

    Raises:
        FrameError, EOFError, TimeoutError: it is larger, the other end is gone, it is late.
    """
    length, size = struct.unpack(">QQ", _read(connection, 16, deadline))
    if length > MAX_HEADER or size > limit + MAX_HEADER:
        raise FrameError("a frame that is too large")
    return _read(connection, length, deadline), _read(connection, size, deadline)


def _read(connection: socket.socket, count: int, deadline: float | None) -> bytes:
    data = bytearray(count)
    space = memoryview(data)
    while space.nbytes:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            connection.settimeout(left)
        got = connection.recv_into(space)
        if not got:
            raise EOFError("the other end is gone")
        space = space[got:]
    return bytes(data)
