import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from labsupport.profiling.memory import (
    LargestTensor,
    cap_gpu_memory,
    largest_tensor,
    measure_peak_memory,
)
from labsupport.profiling.units import format_bytes

MIB = 2**20


def test_one_allocation_is_counted_to_the_byte():
    use = measure_peak_memory(lambda: torch.empty(1001), device="cpu")
    assert (use.peak_bytes, use.kept_bytes, use.allocations) == (4004, 4004, 1)


def test_the_peak_lies_where_the_most_exists_at_once():
    def call() -> torch.Tensor:
        first = torch.empty(1000, dtype=torch.uint8)
        second = torch.empty(5000, dtype=torch.uint8)
        del second
        third = torch.empty(2000, dtype=torch.uint8)
        del first
        return third

    use = measure_peak_memory(call, device="cpu")
    assert (use.peak_bytes, use.kept_bytes) == (6000, 2000)


def test_a_nested_call_adds_to_what_its_caller_holds():
    def inner() -> int:
        return torch.empty(300, dtype=torch.uint8).numel() + torch.empty(0).numel()

    def outer() -> torch.Tensor:
        held = torch.empty(100, dtype=torch.uint8)
        inner()
        return held

    use = measure_peak_memory(outer, device="cpu")
    assert (use.peak_bytes, use.kept_bytes) == (400, 100)


def test_views_and_earlier_tensors_cost_nothing():
    earlier = torch.empty(64, 64)
    use = measure_peak_memory(lambda: earlier.t().reshape(64, 64)[1:].expand(63, 64), device="cpu")
    assert use.peak_bytes == 0


def test_freeing_an_earlier_tensor_does_not_hide_a_later_allocation():
    held = [torch.empty(10_000, dtype=torch.uint8)]

    def call() -> torch.Tensor:
        fresh = torch.empty(500, dtype=torch.uint8)
        held.clear()
        return fresh

    assert measure_peak_memory(call, device="cpu").peak_bytes == 500


def test_neither_does_freeing_what_an_earlier_measurement_saw():
    """PyTorch remembers those sizes by address, also when the address has another block by now."""
    held: list[torch.Tensor] = []
    for _ in range(5):
        measure_peak_memory(
            lambda: held.append(torch.empty(10_000, dtype=torch.uint8)), device="cpu"
        )

        def call() -> torch.Tensor:
            held.clear()
            return torch.empty(500, dtype=torch.uint8)

        use = measure_peak_memory(call, device="cpu")
        assert (use.peak_bytes, use.kept_bytes) == (500, 500)


def test_steps_that_drop_the_gradients_of_the_one_before_need_the_same_every_time():
    model = torch.nn.Sequential(*(torch.nn.Linear(100, 100) for _ in range(5)))
    x = torch.ones(10, 100)

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    step()  # its gradients are seen by no measurement
    peaks = {measure_peak_memory(step, device="cpu").peak_bytes for _ in range(5)}
    assert len(peaks) == 1
    assert peaks.pop() > sum(p.numel() * 4 for p in model.parameters())


def test_the_backward_pass_is_counted():
    x = torch.ones(1000, requires_grad=True)

    def call() -> torch.Tensor:
        return torch.autograd.grad(x.exp().sum(), x)[0]

    forward = measure_peak_memory(lambda: x.exp().sum(), device="cpu")
    both = measure_peak_memory(call, device="cpu")
    assert forward.peak_bytes == 4000 + 4  # exp(x) is kept for the backward, and the sum
    assert both.peak_bytes >= 2 * 4000
    assert both.kept_bytes == 4000


@pytest.mark.parametrize(
    ("backend", "at_least", "at_most"),
    # The flash kernel takes some 0.6 MiB of scratch for each thread.
    [
        (SDPBackend.FLASH_ATTENTION, 4, 5 + torch.get_num_threads()),
        (SDPBackend.MATH, 512, 700),
    ],
)
def test_scratch_space_inside_a_fused_kernel_is_counted(backend, at_least, at_most):
    q = torch.randn(1, 4, 4096, 64)

    def call() -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, q, q)

    use = measure_peak_memory(call, device="cpu")
    # The output alone is 4 MiB; the textbook path holds two matrices of 4 x 4096 x 4096 float32.
    assert at_least * MIB < use.peak_bytes < at_most * MIB
    assert use.kept_bytes == 4 * MIB


def test_measuring_twice_gives_the_same_bytes():
    q = torch.randn(2, 2, 128, 16, requires_grad=True)

    def call() -> torch.Tensor:
        return torch.autograd.grad(F.scaled_dot_product_attention(q, q, q).sum(), q)[0]

    assert measure_peak_memory(call, device="cpu") == measure_peak_memory(call, device="cpu")


def test_measuring_inside_another_profiler_is_refused():
    with torch.profiler.profile(), pytest.raises(RuntimeError, match="already active"):
        measure_peak_memory(lambda: None, device="cpu")


def test_an_error_of_the_call_passes_through_and_leaves_no_profiler_behind():
    with pytest.raises(ZeroDivisionError):
        measure_peak_memory(lambda: 1 / 0, device="cpu")
    assert measure_peak_memory(lambda: torch.empty(1), device="cpu").peak_bytes == 4


def test_measuring_writes_nothing_to_stderr_but_what_the_call_itself_writes():
    code = (
        "import sys, torch\n"
        "from labsupport.profiling.memory import measure_peak_memory\n"
        "earlier = [torch.empty(10)]\n"  # releasing it during a profile makes PyTorch warn
        "call = lambda: (torch.empty(10), earlier.clear(), print('a word', file=sys.stderr))\n"
        "print(measure_peak_memory(call, device='cpu').peak_bytes)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("40\n", "a word\n")


def test_the_largest_tensor_of_textbook_attention_is_the_score_matrix():
    q = torch.randn(3, 96, 8)
    largest = largest_tensor(lambda: torch.softmax(q @ q.mT, dim=-1) @ q)
    assert largest.shape == (3, 96, 96)
    assert (largest.numel, largest.nbytes) == (3 * 96 * 96, 3 * 96 * 96 * 4)
    assert largest.op.startswith("aten.")


def test_the_largest_tensor_may_come_from_the_backward_pass():
    x = torch.ones(1, requires_grad=True)
    with LargestTensor() as largest:
        total = x.expand(50, 50).sum()
        assert largest.numel == 1
        torch.autograd.grad(total, x)
    assert largest.numel < 2500  # the gradient of a broadcast sum is never written out
    with LargestTensor() as largest:
        torch.autograd.grad((x.expand(50, 50) * torch.ones(1)).sum(), x)
    assert largest.numel == 2500


def test_views_are_not_new_tensors():
    base = torch.empty(10, 10)
    largest = largest_tensor(lambda: base.view(100).expand(1000, 100).transpose(0, 1))
    assert (largest.numel, largest.shape, largest.op) == (0, (), "")
    assert str(largest) == "no tensor was created"


def test_a_storage_that_grows_in_place_is_noticed():
    small = torch.empty(10)
    assert largest_tensor(lambda: small.resize_(1000)).numel == 1000


def test_capping_a_missing_gpu_says_so():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(RuntimeError, match="no GPU here"):
        cap_gpu_memory(8)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5.25 * MIB, "5.2 MiB"), (-2048, "-2.0 KiB")],
)
def test_bytes_are_written_in_binary_units(count, text):
    assert format_bytes(count) == text


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@needs_gpu
def test_gpu_memory_is_counted_to_the_byte():
    use = measure_peak_memory(lambda: torch.empty(1001, device="cuda"), device="cuda")
    assert use.peak_bytes == use.kept_bytes == 4004
    assert use.allocated_bytes == 4096


@needs_gpu
def test_a_capped_gpu_runs_out_of_memory_and_recovers():
    size = 2 * 2**30
    with cap_gpu_memory(1), pytest.raises(torch.OutOfMemoryError):
        torch.empty(size, dtype=torch.uint8, device="cuda")
    assert torch.empty(size, dtype=torch.uint8, device="cuda").numel() == size
