import os
import subprocess
import sys

import pytest
import torch

from labsupport.training.saving.limit import memory_limit, parse_bytes

on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits on Linux only")
BEGIN = """
import resource, torch
from labsupport.training.saving.limit import _private_bytes, memory_limit
MIB = 2**20
torch.set_num_threads(2)
"""


def run(code: str) -> str:
    """What a process of its own prints. A process that is killed or hangs is a failure."""
    result = subprocess.run(
        [sys.executable, "-c", BEGIN + code],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("size", "count"),
    [
        *(("16GiB", 2**34), ("8 GB", 8 * 10**9), ("500MiB", 500 * 2**20), ("1.5 kB", 1500)),
        *((" 2 tib ", 2**41), ("7", 7), ("7B", 7), (4096, 4096), ("0.1 GiB", 2**30 // 10)),
    ],
)
def test_sizes_are_read_in_binary_and_decimal_units(size, count):
    assert parse_bytes(size) == count


@pytest.mark.parametrize("size", ["", "GiB", "16 G", "16 gigabytes", "1,5 GiB", "nan", "1e9"])
def test_what_is_not_a_size_gets_a_clear_error(size):
    with pytest.raises(ValueError, match='such as "16GiB"'):
        parse_bytes(size)


@pytest.mark.parametrize("size", [0, -5, "0 GiB", "-1 GiB", "0.1 B"])
def test_a_size_is_at_least_one_byte(size):
    with pytest.raises(ValueError, match="at least one byte"):
        parse_bytes(size)


@pytest.mark.parametrize("size", [1e9, None, True])
def test_a_size_is_text_or_an_integer(size):
    with pytest.raises(TypeError, match="integer"):
        parse_bytes(size)


@on_linux
def test_the_whole_process_gets_the_limit_and_not_more():
    """Tensors of 8 MiB until it fails: the process then has the limit, up to one of them."""
    out = run("""
limit, tensors = _private_bytes() + 300 * MIB, []
try:
    with memory_limit(limit, "cpu"):
        while True:
            tensors.append(torch.zeros(2 * MIB))
            used = _private_bytes()
except torch.OutOfMemoryError:
    print(limit - used)
""")
    assert 0 <= int(out) <= 10 * 2**20


@on_linux
def test_the_error_names_the_limit_the_request_and_what_helps_in_order():
    out = run("""
try:
    with memory_limit("3GiB", "cpu"):
        torch.zeros(2**30)
except torch.OutOfMemoryError as error:
    print(error, "|", type(error.__cause__).__name__)
""")
    assert "another 4.0 GiB does not fit into the limit of 3.0 GiB" in out
    places = [out.index(word) for word in ("loss_chunk", "checkpoint)", "mlp_chunk", "shorter")]
    assert places == sorted(places)
    assert out.strip().endswith("| RuntimeError")


@on_linux
def test_whatever_asks_for_too_much_it_is_an_exception_and_the_process_lives_on():
    """Small tensors (C++ itself has nothing left), NumPy, oneDNN, attention with its gradient."""
    out = run("""
import numpy as np, torch.nn.functional as F
q = torch.randn(1, 4, 1024, 64, requires_grad=True)
a, b = torch.randn(5000, 64).bfloat16(), torch.randn(64, 2000).bfloat16()
works = [
    lambda: torch.zeros(100),
    lambda: np.zeros(MIB),
    lambda: a @ b,
    lambda: (torch.zeros(5 * MIB), F.scaled_dot_product_attention(q, q, q).sum().backward()),
]
for work in works:
    kept = []
    try:
        with memory_limit(_private_bytes() + 150 * MIB, "cpu"):
            while True:
                kept.append(work())
    except torch.OutOfMemoryError:
        kept.clear()
        print(float(torch.ones(100 * MIB).sum()) == 100 * MIB)
""")
    assert out.split() == ["True"] * 4


@on_linux
def test_with_nothing_left_threads_still_work():
    out = run("""
kept, size = [], 64 * MIB
limit = _private_bytes() + 150 * MIB
with memory_limit(limit, "cpu"):
    x, y = torch.randn(2, 200, 200, requires_grad=True)
    large, spare = torch.empty(10**5), torch.empty(MIB)
    while size >= 2**17:
        try:
            kept.append(torch.zeros(size // 4))
        except RuntimeError:
            size //= 2
    left = limit - _private_bytes()
    del spare  # 4 MiB, half of what one thread's stack takes
    large.fill_(1).exp_()
    (x @ y).sum().backward()
print(left < MIB)
""")
    assert out.strip() == "True"


@on_linux
def test_the_limit_before_holds_again_afterwards_and_the_smallest_of_nested_ones():
    out = run("""
def soft(): return resource.getrlimit(resource.RLIMIT_DATA)[0]
before = soft()
with memory_limit("4GiB", "cpu"):
    with memory_limit("6GiB", "cpu"):
        print(soft() == 2**32)
    with memory_limit("3GiB", "cpu"):
        print(soft() == 3 * 2**30)
    print(soft() == 2**32)
try:
    with memory_limit("4GiB", "cpu"):
        raise KeyError("something else")
except KeyError:
    print(soft() == before)
""")
    assert out.split() == ["True"] * 4


@on_linux
def test_an_error_is_explained_once_by_the_innermost_limit():
    out = run("""
try:
    with memory_limit("4GiB", "cpu"), memory_limit("3GiB", "cpu"):
        torch.zeros(2**30)
except torch.OutOfMemoryError as error:
    print(error)
""")
    assert out.count("loss_chunk") == 1
    assert "3.0 GiB" in out


@on_linux
def test_a_limit_below_what_the_process_has_is_refused():
    with pytest.raises(ValueError, match=r"takes .* already.*limit of 1.0 MiB"):
        memory_limit("1MiB", "cpu").__enter__()


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(RuntimeError, match="on Linux only"):
        memory_limit("1GiB", "cpu").__enter__()


def test_other_devices_are_refused():
    with pytest.raises(RuntimeError, match="not that of meta"):
        memory_limit("1GiB", "meta")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_allocator_keeps_the_limit():
    with (
        pytest.raises(torch.OutOfMemoryError, match=r"limit of 1\.0 GiB for PyTorch's allocator"),
        memory_limit("1GiB", "cuda") as limit,
    ):
        assert limit.outside_bytes > 0
        torch.zeros(2**29, device="cuda")
    torch.zeros(2**29, device="cuda")
