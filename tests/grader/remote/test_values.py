import json

import numpy as np
import pandas as pd
import pytest
import torch

from grader.remote.values import DTYPES, Foreign, FrameError, pack, unpack
from labsupport.precision import FlashAttentionConfig


def there_and_back(value):
    return unpack(pack(value))


PLAIN = [None, True, 7, -(2**70), 0.1, float("inf"), "ü", (1, [2, {"a": None}])]


@pytest.mark.parametrize("value", PLAIN, ids=str)
def test_plain_values_arrive_as_they_are(value):
    assert there_and_back(value) == value
    assert type(there_and_back(value)) is type(value)


@pytest.mark.parametrize("name", DTYPES)
def test_tensors_of_every_dtype_arrive_bit_for_bit(name):
    x = torch.randint(0, 2, (3, 4)).to(DTYPES[name])
    y = there_and_back(x)
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    assert torch.equal(y.view(torch.uint8), x.view(torch.uint8))


@pytest.mark.parametrize(
    "x",
    [torch.arange(12.0).reshape(3, 4).T, torch.arange(24.0)[::2], torch.ones(1, 5).expand(4, 5),
     torch.tensor(3.0), torch.zeros(0, 3)],
    ids=["turned", "steps", "expanded", "scalar", "empty"],
)  # fmt: skip
def test_strides_arrive(x):
    y = there_and_back(x)
    assert torch.equal(x, y)
    assert x.numel() == 0 or x.stride() == y.stride()


def test_arrays_and_numbers_of_numpy_arrive():
    x = np.arange(6).reshape(2, 3)
    assert np.array_equal(there_and_back(x), x)
    assert type(there_and_back(np.float32(2))) is np.float32


def test_a_table_arrives():
    table = pd.DataFrame({"backend": ["a", "b"], "ms": [1.0, 2.0], "held": [True, False]})
    assert there_and_back(table).equals(table)


def test_a_layer_arrives_with_its_plain_attributes_and_a_policy_whole():
    layer = torch.nn.Linear(2, 2)
    layer.layer_idx = 3
    made = there_and_back(layer)
    assert (type(made).__name__, made.layer_idx, list(made.parameters())) == ("Linear", 3, [])
    assert there_and_back(FlashAttentionConfig.float16()) == FlashAttentionConfig.float16()


def test_anything_else_is_foreign():
    made = there_and_back(object())
    assert isinstance(made, Foreign)
    assert repr(made) == "<object>"


def test_too_large_or_too_deep_is_refused():
    with pytest.raises(FrameError, match="large"):
        pack(torch.zeros(1000), limit=100)
    nested = []
    for _ in range(100):
        nested = [nested]
    with pytest.raises(FrameError, match="parts"):
        pack(nested)


@pytest.mark.parametrize(
    "node",
    [
        ["tensor", ["0", [99], [1], False]],
        ["tensor", ["0", [2**39], [0], False]],
        ["tensor", ["0", [2], [100], False]],
        ["tensor", ["0", [2], [-1], False]],
        ["tensor", ["1", [2], [1], False]],
        ["array", ["0", [3]]],
        ["dtype", "os.system"],
        ["eval", "1"],
        ["float", "x"],
        [1, 2],
        {"a": 1},
    ],
    ids=str,
)
def test_a_frame_that_lies_is_refused(node):
    with pytest.raises(FrameError):
        unpack((json.dumps(node).encode(), pack(torch.zeros(2))[1]))


def test_a_body_that_is_no_safetensors_is_refused():
    header, body = pack(torch.zeros(2))
    for wrong in (b"", b"x", body[:-1], body + b"x"):
        with pytest.raises(FrameError):
            unpack((header, wrong))
