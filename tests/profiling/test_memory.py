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
from labsupport.profiling.trace import trace
from labsupport.profiling.units import format_bytes

MIB = 2**20


def room(size):
    return torch.empty(size, dtype=torch.uint8)


def measured(call):
    use = measure_peak_memory(call, device="cpu")
    return use.peak_bytes, use.kept_bytes


def test_allocations_are_counted_to_the_byte_at_the_moment_when_most_exists():
    def call():
        first, second = room(1000), room(5000)
        del second
        third = room(2000)
        del first
        return third

    assert measured(call) == (6000, 2000)
    earlier = torch.empty(64, 64)
    assert measured(lambda: earlier.t().reshape(64, 64)[1:].expand(63, 64)) == (0, 0)


def test_freeing_an_earlier_tensor_does_not_hide_a_later_allocation():
    """PyTorch remembers those sizes by address, also when the address has another block by now."""
    held = [room(10_000)]  # seen by no measurement

    def call():
        held.clear()
        return room(500)

    for _ in range(5):
        assert measured(call) == (500, 500)
        measured(lambda: held.append(room(10_000)))


def test_scratch_space_inside_a_fused_kernel_is_counted():
    q = torch.randn(1, 4, 1024, 64)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        peak, kept = measured(lambda: F.scaled_dot_product_attention(q, q, q))
    # Beside the output of 1 MiB it takes some 0.6 MiB for each thread.
    assert MIB == kept < peak < (2 + torch.get_num_threads()) * MIB


def test_measuring_inside_another_profiler_is_refused():
    with torch.profiler.profile():
        for measure in (measure_peak_memory, trace):
            with pytest.raises(RuntimeError, match="already"):
                measure(lambda: None, device="cpu")


def test_measuring_writes_nothing_to_stderr_but_what_the_call_itself_writes(python):
    code = (
        "import sys, torch\n"
        "from labsupport.profiling.memory import measure_peak_memory\n"
        "earlier = [torch.empty(10)]\n"  # releasing it during a profile makes PyTorch warn
        "call = lambda: (torch.empty(10), earlier.clear(), print('a word', file=sys.stderr))\n"
        "print(measure_peak_memory(call, device='cpu').peak_bytes)\n"
    )
    done = python("-c", code, check=True)
    assert (done.stdout, done.stderr) == ("40\n", "a word\n")


def test_the_largest_tensor_of_textbook_attention_is_the_score_matrix_and_views_are_none():
    q = torch.randn(3, 96, 8)
    largest = largest_tensor(lambda: torch.softmax(q @ q.mT, dim=-1) @ q)
    assert largest.shape == (3, 96, 96)
    assert (largest.numel, largest.nbytes) == (3 * 96 * 96, 3 * 96 * 96 * 4)
    assert largest.op.startswith("aten.")
    largest = largest_tensor(lambda: q.view(-1).expand(1000, -1).transpose(0, 1))
    assert (largest.numel, largest.shape, largest.op) == (0, (), "")
    assert str(largest) == "no tensor was created"


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


def test_bytes_are_written_in_binary_units():
    counts = 0, 1023, 1536, 5.25 * MIB, -2048, 3000 * 2**30
    texts = ["0 B", "1023 B", "1.5 KiB", "5.2 MiB", "-2.0 KiB", "3,000.0 GiB"]
    assert [format_bytes(count) for count in counts] == texts


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_capping_a_missing_gpu_says_so():
    with pytest.raises(ValueError, match="no GPU here"), cap_gpu_memory(8):
        pass


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_gpu_memory_is_counted_to_the_byte_and_a_capped_gpu_runs_out_and_recovers():
    use = measure_peak_memory(lambda: torch.empty(1001, device="cuda"), device="cuda")
    assert (use.peak_bytes, use.kept_bytes) == (4004, 4004)
    size = 2 * 2**30
    with cap_gpu_memory(1), pytest.raises(torch.OutOfMemoryError):
        torch.empty(size, dtype=torch.uint8, device="cuda")
    assert torch.empty(size, dtype=torch.uint8, device="cuda").numel() == size
