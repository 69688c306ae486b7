"""Values survive a frame, and bytes that are no frame build nothing."""

import json
import math
import struct

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from grader.handover.codec import (
    DTYPES,
    MAGIC,
    Foreign,
    HandoverError,
    decode,
    encode,
)
from labsupport.precision import FlashAttentionConfig


def through(value, **options):
    return decode(bytearray(b"".join(bytes(part) for part in encode(value, **options))))


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, 0, -(10**40), 0.1, math.inf, -0.0, "text", "", "\ud800"[:0]),
        *((), (1, (2, [3, {"a": None}])), {"k": (1.5, "x")}, range(3, 9, 2), slice(1, None, 2)),
        *(torch.bfloat16, torch.device("cpu"), np.float32(1.5), np.int64(7)),
    ],
)
def test_plain_values_come_back_equal_and_of_the_same_type(value):
    back = through(value)
    assert back == value
    assert type(back) is type(value)


def test_nan_comes_back():
    assert math.isnan(through(math.nan))


@pytest.mark.parametrize("name", list(DTYPES))
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3, 4)])
def test_tensors_of_every_dtype_come_back_with_the_same_bits(name, shape):
    x = torch.arange(math.prod(shape) or 1).reshape(shape or ()) if math.prod(shape) else (
        torch.empty(shape)
    )  # fmt: skip
    x = x.to(DTYPES[name])
    back = through(x)
    assert (back.dtype, back.shape) == (x.dtype, x.shape)
    wide = torch.complex128 if x.is_complex() else torch.float64
    assert torch.equal(back.to(wide), x.to(wide))


def test_strides_are_kept_and_gaps_are_left_out_of_what_a_student_sends():
    x = torch.randn(2, 6, 3, 4).transpose(1, 2)
    assert through(x).stride() == x.stride()
    column = torch.randn(1000, 100)[:, :1]
    assert through(column).is_contiguous()
    assert through(column, compact=False).stride() == (100, 1)
    assert torch.equal(through(column, compact=False), column)


def test_a_tensor_says_whether_it_requires_gradients():
    assert through(torch.ones(2, requires_grad=True)).requires_grad
    assert not through(torch.ones(2)).requires_grad


def test_tables_come_back_equal_with_their_index():
    table = pd.DataFrame({"name": ["a", None, "c"], "ms": [1.0, math.nan, 3.0], "ok": [True] * 3})
    table = table.sample(frac=1, random_state=1)
    assert through(table).equals(table)
    assert through(table.ms).equals(table.ms.rename(None))


def test_a_policy_and_an_attention_layer_come_back():
    policy = FlashAttentionConfig.float16(residual=torch.float32)
    assert through(policy) == policy
    module = nn.Module()
    module.is_causal, module.layer_idx, module.config = True, 3, object()
    back = through(module.eval())
    assert (back.is_causal, back.layer_idx, back.training) == (True, 3, False)
    assert not hasattr(back, "config")


class Sly(str):
    def __eq__(self, other):
        return True

    __hash__ = str.__hash__


def test_whatever_else_there_is_comes_back_as_an_empty_object_with_its_types_name():
    for value in (object(), lambda: 1, {1: 2}, np.array([object()]), torch.nn.ReLU):
        back = through(value)
        assert isinstance(back, Foreign)
        assert type(back).__name__ == type(value).__name__
    assert through(nn.ReLU).__name__ == "ReLU"


def test_a_subclass_becomes_the_plain_kind():
    assert type(through(Sly("x"))) is str
    assert through(Sly("x")) != "y"


def test_what_is_too_large_or_too_deep_is_not_sent():
    deep = []
    for _ in range(100):
        deep = [deep]
    for value in (deep, [0] * 300_000, "x" * 2_000_000, torch.zeros(2**26)):
        with pytest.raises(HandoverError):
            encode(value)
    endless = []
    endless.append(endless)
    with pytest.raises(HandoverError):
        encode(endless)


def frame(tree, body=b""):
    header = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
    start = MAGIC + struct.pack(">II", len(header), len(body))
    return bytearray(start + header + bytes(-(12 + len(header)) % 64) + body)


def tensor(shape, stride, start=0, size=64, name="float32"):
    return ["tensor", [name, shape, stride, start, size, False]]


@pytest.mark.parametrize(
    "tree",
    [
        *(b"", b"{", b"\xff\xfe", b"[" * 100_000, b"9" * 10_000, {"a": 1}, 1.5, ["none such", 1]),
        *(["float", "zero"], ["float", 3], ["tuple", 3], ["dict", [[1, 2]]], ["range", [1, 2, 0]]),
        *(["dtype", "object"], ["dtype", ["float32"]], ["value", 1], ["__class__", 1], [[], []]),
        *(["column", ["array", 1]], ["name", "os"], ["stream", 0], ["view", [0, [1], [1], 0]]),
        *(["policy", ["dict", [["attention", 3]]]], ["policy", ["dict", [["none", None]]]]),
        *(["frame", [["a"], ["object", []], []]], ["series", 1], ["module", ["x", 3]]),
        ["array", ["O8", [8], 0, 64]],
        ["array", ["<f4", [17], 0, 64]],
        ["array", ["<f4", [-16], 0, 64]],
        tensor([2**40], [0], size=4),
        tensor([16], [-1]),
        tensor([16], [1], start=64),
        tensor([16], [1], start=-64),
        tensor([16], [1], start=4),
        tensor([2**31, 2**31], [0, 0], size=4),
        tensor([17], [1]),
        tensor([4, 4], [4]),
        tensor([True], [1], size=4),
        tensor([1.0], [1], size=4),
        tensor([1] * 100, [1] * 100, size=4),
        tensor([16], [1], name="qint8"),
        ["list", [["list", [["list", []]] * 2]] * 150_000],
    ],
)
def test_a_frame_that_nobody_would_send_is_refused(tree):
    with pytest.raises(HandoverError):
        decode(frame(tree, bytes(64)))


@pytest.mark.parametrize(
    "bytes_", [b"", b"LH1\n", b"x" * 12, b"\x80\x04K\x01.", MAGIC + b"\xff" * 8]
)
def test_what_is_no_frame_is_refused(bytes_):
    with pytest.raises(HandoverError):
        decode(bytearray(bytes_))


def test_booleans_are_0_or_1_whatever_the_bytes():
    back = decode(
        frame(["tensor", ["bool", [4], [1], 0, 4, False]], b"\x00\x01\x02\xff" + bytes(60))
    )
    assert back.tolist() == [False, True, True, True]
    assert back.sum() == 3
