"""One call under torch.profiler: `labsupport.profiling.trace`."""

import gzip
import json
import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from labsupport.attention.backends import attention
from labsupport.profiling import measure_peak_memory
from labsupport.profiling.trace import moved_bytes, trace
from labsupport.profiling.trace.export import launches, read_launches, whole_file
from labsupport.profiling.trace.tables import kernel_table

BATCH, SEQLEN, HEADS, DIM = 2, 64, 3, 16
SCORES = BATCH * HEADS * SEQLEN * SEQLEN


@pytest.fixture(scope="module")
def qkv():
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, SEQLEN, HEADS, DIM)
    return tuple(torch.randn(shape, generator=generator) for _ in range(3))


@pytest.fixture(scope="module")
def textbook(qkv):
    return trace(lambda: attention(*qkv, backend="standard"), device="cpu")


def row_of(seen, name):
    table = seen.kernels()
    return table[table["name"] == name].iloc[0]


def test_the_textbook_shows_two_products_with_their_flops(textbook):
    products = row_of(textbook, "aten::bmm")
    assert products["calls"] == 2
    assert products["flops"] == 4 * SCORES * DIM
    # Two inputs and a result for each product: q, k -> S; P, v -> O.
    assert products["bytes"] == 4 * (2 * SCORES + 4 * BATCH * SEQLEN * HEADS * DIM)


def test_operators_that_pytorch_does_not_count_have_no_flops(textbook):
    assert row_of(textbook, "aten::_softmax")["flops"] != 0  # NaN: not known, not none
    assert torch.tensor(row_of(textbook, "aten::_softmax")["flops"]).isnan()


def test_shares_add_up_and_the_longest_comes_first(textbook):
    table = textbook.kernels()
    assert table["share"].sum() == pytest.approx(1)
    assert table["device_ms"].is_monotonic_decreasing
    assert table["device_ms"].sum() <= textbook.wall_ms


def test_the_memory_curve_peaks_where_the_exact_measurement_says(qkv, textbook):
    curve = textbook.memory()
    use = measure_peak_memory(lambda: attention(*qkv, backend="standard"), device="cpu")
    assert textbook.peak_bytes == use.peak_bytes
    assert curve["extra_bytes"].iloc[-1] == use.kept_bytes
    assert curve["time_ms"].is_monotonic_increasing
    assert curve["time_ms"].iloc[-1] == pytest.approx(textbook.wall_ms)


def test_a_backward_pass_is_seen(qkv):
    q = qkv[0].clone().requires_grad_()

    def step():
        out = attention(q, *qkv[1:], backend="standard")
        assert isinstance(out, torch.Tensor)
        out.sum().backward()

    seen = trace(step, device="cpu")
    assert row_of(seen, "aten::_softmax_backward_data")["calls"] == 1
    assert row_of(seen, "aten::bmm")["calls"] == 4  # k and v need no gradient


def test_a_saved_trace_is_a_timeline_that_names_the_operators(textbook, tmp_path):
    path = textbook.save(tmp_path / "call.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert [e["name"] for e in events].count("aten::bmm") == 2
    plain = textbook.save(tmp_path / "call.json")
    assert json.loads(plain.read_text())["traceEvents"]
    assert read_launches(path).empty  # no GPU's kernel in it
    assert textbook.launches().empty
    assert sorted(p.name for p in tmp_path.iterdir()) == ["call.json", "call.json.gz"]


def test_a_trace_needs_a_name_that_says_its_format(textbook, tmp_path):
    with pytest.raises(ValueError, match=r"\.json"):
        textbook.save(tmp_path / "call.txt")
    assert not list(tmp_path.iterdir())


def test_a_trace_that_does_not_fit_on_the_disk_leaves_nothing(tmp_path):
    code = (
        "import sys, torch; from labsupport.profiling.trace import trace\n"
        "seen = trace(lambda: [torch.ones(3) + i for i in range(200)], device='cpu')\n"
        "try: seen.save(sys.argv[1])\n"
        "except OSError as error: print('refused:', error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "big.json")],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
    )
    assert "refused:" in done.stdout, done.stderr
    assert not list(tmp_path.iterdir())


def test_a_file_that_fails_half_way_leaves_the_old_one(tmp_path):
    path = tmp_path / "text"
    path.write_text("old")
    with pytest.raises(OSError, match="full"), whole_file(path) as part:
        part.write_text("ne")
        raise OSError("the disk is full")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["text"]


def test_a_trace_within_a_profile_is_refused():
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        pytest.raises(RuntimeError, match="active here already"),
    ):
        trace(lambda: None, device="cpu")


def test_bytes_count_what_is_given_and_made_and_views_move_nothing():
    x = torch.ones(1000)
    assert moved_bytes(lambda: x + x) == {"aten::add": 8000}  # x once, and the sum
    assert moved_bytes(lambda: x.view(10, 100).T[1:].expand(99, 10)) == {}
    assert moved_bytes(lambda: x.mul_(2)) == {"aten::mul_": 8000}  # read and written
    assert moved_bytes(lambda: torch.empty(5)) == {}
    wide = torch.ones(1).expand(1000)  # one number, shown a thousand times
    assert moved_bytes(lambda: wide + 1) == {"aten::add": 4 + 4000}


def test_fused_attention_moves_its_inputs_and_results_only(qkv):
    fused = sum(moved_bytes(lambda: attention(*qkv, backend="sdpa_flash")).values())
    tensors = 4 * 4 * BATCH * SEQLEN * HEADS * DIM
    lse = 4 * BATCH * SEQLEN * HEADS
    assert tensors <= fused <= tensors + 2 * lse
    stored = sum(moved_bytes(lambda: attention(*qkv, backend="standard")).values())
    assert stored >= tensors + 4 * 4 * SCORES  # S and P, each written and read


def gpu_event(name, us):
    return SimpleNamespace(
        name=name,
        device_type=DeviceType.CUDA,
        time_range=SimpleNamespace(elapsed_us=lambda: us),
        kernels=[],
        flops=0,
        self_cpu_time_total=0,
    )


def operator_event(name, kernels, cpu_us, flops=0):
    return SimpleNamespace(
        name=name,
        device_type=DeviceType.CPU,
        kernels=[SimpleNamespace(name=n, duration=us) for n, us in kernels],
        flops=flops,
        self_cpu_time_total=cpu_us,
    )


def test_on_a_gpu_rows_are_kernels_with_the_operator_that_launched_them():
    events = [
        operator_event("aten::matmul", [], 5),
        operator_event("aten::bmm", [("gemm", 900), ("reduce", 100)], 20, flops=1_000),
        operator_event("aten::bmm", [("gemm", 1100)], 20, flops=1_000),
        gpu_event("gemm", 900),
        gpu_event("reduce", 100),
        gpu_event("gemm", 1100),
        gpu_event("flash_kernel", 3000),  # replayed from a graph: no operator launched it
    ]
    table = kernel_table(events, gpu=True, moved={"aten::bmm": 512})
    assert table["name"].tolist() == ["flash_kernel", "gemm", "reduce"]
    gemm = table.iloc[1]
    assert (gemm["operator"], gemm["calls"], gemm["device_ms"]) == ("aten::bmm", 2, 2.0)
    assert gemm["flops"] == 2_000
    assert gemm["bytes"] == 512
    assert gemm["cpu_ms"] == pytest.approx(0.03)
    assert table["share"].iloc[0] == pytest.approx(3 / 5.1)
    assert table["bytes"].isna().tolist() == [True, False, True]


def test_what_the_profiler_itself_does_is_no_operator_and_counts_no_kernel_again():
    events = [
        operator_event("aten::bmm", [("gemm", 900)], 20),
        operator_event("Activity Buffer Request", [("gemm", 900)], 400),
        gpu_event("gemm", 900),
    ]
    table = kernel_table(events, gpu=True)
    assert table[["operator", "calls", "device_ms"]].values.tolist() == [["aten::bmm", 1, 0.9]]


def test_an_occupancy_that_the_profiler_cannot_estimate_is_none():
    figures = {"shared memory": 150_000, "est. achieved occupancy %": 0}
    table = launches([{"cat": "kernel", "name": "k", "dur": 1.0, "args": figures}])
    assert table["occupancy_percent"].isna().all()


def test_launches_are_read_from_the_events_of_a_gpus_kernels():
    figures = {"registers per thread": 128, "shared memory": 65536, "blocks per SM": 1.9}
    figures |= {"grid": [256, 1, 1], "block": [128, 1, 1], "est. achieved occupancy %": 12}
    events = [
        {"cat": "kernel", "name": "k", "dur": 250.0, "args": figures},
        {"cat": "kernel", "name": "k", "dur": 50.0, "args": figures | {"grid": [1, 1, 1]}},
        {"cat": "cpu_op", "name": "aten::bmm", "dur": 9.0, "args": {}},
    ]
    table = launches(events)
    assert len(table) == 1
    row = table.iloc[0]
    assert (row["calls"], row["ms"], row["grid"]) == (2, 0.3, [256, 1, 1])
    assert (row["registers"], row["shared_bytes"], row["occupancy_percent"]) == (128, 65536, 12)
