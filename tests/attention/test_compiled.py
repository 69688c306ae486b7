"""Kernels as the compiler sees them: on any machine with Triton, a GPU or not.

Triton compiles or interprets, not both: one process without the interpreter does all of it.
"""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.resources import LIMITS
from labsupport.attention.kernels import mode
from labsupport.attention.kernels.config import RESIDENT

if sys.platform != "linux":
    pytest.skip("Triton exists for Linux only", allow_module_level=True)

pytestmark = pytest.mark.slow  # 40 seconds of compiling
DECODE_CASES = [(80, 128, 8), (90, 128, 64)]  # compute capability, head_dim, rows

SCRIPT = """
import json, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from benchmarks.resources import machine_code, source_of
from labsupport.attention.call import AttentionCall
from labsupport.attention.kernels.autograd import backward, forward
from labsupport.attention.kernels.common import run_kernel
from labsupport.attention.kernels.config import decode_tiling
from labsupport.attention.kernels.decode import MERGED_AT_ONCE, _decode_merge, _decode_split
from labsupport.attention.kernels import backward as plain_backward
from labsupport.attention.kernels import backward_gluon, forward_fp8, forward_gluon
from labsupport.attention.kernels.template import softmax_update, with_update_kernel
from labsupport.models.generation import linear

found = {"template": [], "decode": [], "gluon": {}, "backward": [], "fp8": [], "linear": {}}
found["launches"] = []

# --- a function that is given to a kernel

constants = {"update": softmax_update, "D": 64, "BLOCK_Q": 64, "BLOCK_K": 64, "CAUSAL": True}
for capability in (80, 90):
    source = source_of(with_update_kernel, dict(constants), "bf16", {"L": "*fp32"})
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
    found["template"].append(["ex2" in ptx, "mma" in ptx])

# --- registers and shared memory of decoding

for capability, head_dim, rows in json.loads(sys.argv[1]):
    config = decode_tiling(rows, head_dim, torch.bfloat16)
    constants = {"HEAD_DIM": head_dim, "D": head_dim, "BLOCK_SPLITS": MERGED_AT_ONCE}
    constants |= {"BLOCK_Q": config.block_q, "BLOCK_K": config.block_k, "PRECISION": "ieee"}
    constants |= {"LEFT": True, "RIGHT": True, "ALIBI": True, "EARLY": capability >= 90}
    split = _decode_split, config.warps, config.stages
    for kernel, warps, stages in (split, (_decode_merge, 4, 3)):
        built = triton.compile(
            source_of(kernel, dict(constants), "bf16", {"O": "*fp32"}),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": warps, "num_stages": stages},
        )
        found["decode"].append([capability, *machine_code(built)[:2], built.metadata.shared])

# --- the instructions of the Gluon kernel

class Hopper:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

triton.runtime.driver.set_active(Hopper())
packed = {f"cu_seqlens_{x}": torch.zeros(3, dtype=torch.int32) for x in "qk"}
packed |= {"max_seqlen_q": 4096, "max_seqlen_k": 4096, "causal": True}
cases = {
    "packed": (128, packed, {}),
    "three": (64, {}, {}),
    "one": (128, {}, {"CONSUMERS": 1, "TOGETHER": False}),
    "traced": (128, {}, {}),
}
built = []
torch.cuda.get_device_properties = lambda device: type("", (), {"multi_processor_count": 132})
warm_up = lambda kernel, tensors, key, rest: (
    lambda programs, named: built.append(kernel.warmup(**tensors, **named, grid=(programs,)))
)(*rest())
gluon = forward_gluon, backward_gluon, plain_backward
for module in (*gluon, forward_fp8):
    module.run_kernel = warm_up
for case, (head_dim, options, config) in cases.items():
    q = torch.empty(*((4096,) if options else (2, 4096)), 4, head_dim).bfloat16()
    call = AttentionCall(q, q, q, **options)
    lse = torch.empty(*q.shape[:-3], 4, 4096)
    clock = torch.empty(2, 9, 4, dtype=torch.int64) if case == "traced" else None
    forward_gluon.launch(call, q, lse, clock=clock, **config)
    built_now = built.pop()
    ptx = built_now.asm["ptx"]
    counts = [ptx.count(name) for name in ("wgmma.mma_async", "cp.async.bulk.tensor", "clock64")]
    found["gluon"][case] = [built_now.metadata.shared, *counts]
    if clock is None and not config:
        gradients = (torch.empty_like(q) for _ in "qkv")
        backward_gluon.launch(call, q, q, lse, None, *gradients)
        names = "wgmma.mma_async", "cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor"
        ptx = built[1].asm["ptx"]
        found["backward"].append([built[1].metadata.shared, *map(ptx.count, names)])
        built.clear()

# --- the instructions of the kernel in FP8

for head_dim in (64, 128):
    q, lse = torch.empty(2, 4096, 4, head_dim).bfloat16(), torch.empty(2, 4, 4096)
    forward_fp8.launch(AttentionCall(q, q, q, causal=True), q, lse, q[0, :head_dim, 0])
    ptx = built[-1].asm["ptx"]
    names = "m64n128k32.f32.e4m3.e4m3", f"m64n{head_dim}k32.f32.e4m3.e4m3", "bfly"
    found["fp8"].append([machine_code(built[-1])[1], *map(ptx.count, names)])
    built.clear()

# --- the matrices of a decode step

linear.starts_early = lambda device: {"EARLY": True, "launch_pdl": True}
run = linear._linear.run
linear._linear.run = lambda *rest, warmup, **named: built.append(run(*rest, warmup=True, **named))
weight, gain = torch.empty(4096, 768).bfloat16(), torch.empty(768).bfloat16()
for rows in (1, 8, 64):
    x, y = torch.empty(rows, 768).bfloat16(), torch.empty(rows, 2048).bfloat16()
    linear.linear(x, weight, y, gain, 1e-5, swiglu=True)
    ptx = built[-1].asm["ptx"]
    names = "mma.sync", "wgmma.mma_async", "griddepcontrol.wait"
    found["linear"][rows] = [machine_code(built.pop())[1], *(name in ptx for name in names)]

# --- a second launch, which takes the cache: everything but the compiler and the GPU is real

class Compiled:
    function = packed_metadata = None
    def __init__(self, kernel): self.kernel = kernel
    def launch_metadata(self, *rest): return None
    def run(self, x, y, z, stream, function, packed, metadata, enter, leave, *arguments):
        launches.append((self.kernel, (x, y, z), arguments))
    def __getitem__(self, grid):
        return lambda *arguments: launches.append((self.kernel, grid, arguments))

launches = []
triton.runtime.jit.JITFunction._do_compile = lambda self, key, *rest: (
    self.device_caches[0][0].setdefault(key, Compiled(self.fn.__name__))
)

def same(a, b):
    a, b = (getattr(x, "base", x) for x in (a, b))
    if isinstance(a, torch.Tensor):
        return (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    return a == b

def twice(call):
    launches.clear()
    call(), call()
    half = len(launches) // 2
    for (name, *a), (other, *b) in zip(launches[:half], launches[half:], strict=True):
        assert (name, a[0]) == (other, b[0]) and all(map(same, a[1], b[1])), name
        found["launches"].append(name)

q, k = torch.randn(2, 70, 4, 64).half(), torch.randn(2, 90, 2, 64).half()
for module in (*gluon, forward_fp8):
    module.run_kernel = run_kernel
for kernels, options in (
    ("gluon", {"window_size": (3, 0)}),
    ("plain", {"window_size": (5, 0), "alibi_slopes": torch.rand(2, 4)}),
    ("hopper", {}),
):
    call = AttentionCall(q, k, k, softmax_scale=0.1, **options)
    out, lse = forward(call, kernels)
    twice(lambda: forward(call, kernels))
    twice(lambda: backward(call, out, out, lse, kernels))
twice(lambda: forward_fp8.launch(AttentionCall(q, k, k, causal=True), out, lse, q[0, :64, 0]))

print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled(project, tmp_path_factory):
    script = tmp_path_factory.mktemp("compiled") / "script.py"  # Triton reads kernels' source files
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script, json.dumps(DECODE_CASES)],
        env=os.environ | {mode.VARIABLE: "0", "PYTHONPATH": str(project)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_function_given_to_the_template_is_compiled_into_it(compiled):
    assert compiled["template"] == [[True, True]] * 2


def test_decoding_does_not_spill_and_two_programs_fit_on_a_multiprocessor(compiled):
    assert len(compiled["decode"]) == 2 * len(DECODE_CASES)
    for capability, registers, spilled, shared in compiled["decode"]:
        assert spilled == 0
        assert LIMITS[capability].fitting(registers, shared, warps=4) >= RESIDENT


def test_gluon_fits_and_starts_the_products_and_copies_it_should(compiled):
    shared, *counts = zip(*compiled["gluon"].values(), strict=True)
    assert max(shared) <= 227 * 1024
    # S takes head_dim / 16 instructions and O 128 / 16, both twice, for each consumer. The producer
    # copies K, V and a part of Q for each consumer, 64 columns at a time. Four marks, both times.
    assert dict(zip(compiled["gluon"], zip(*counts, strict=True), strict=True)) == {
        "packed": (2 * 2 * (8 + 8), 2 * (2 + 2), 0),
        "three": (3 * 2 * (4 + 8), 2 + 3, 0),
        "one": (1 * 2 * (8 + 8), 2 * (2 + 1), 0),
        "traced": (2 * 2 * (8 + 8), 2 * (2 + 2), 2 * 2 * 4),
    }


def test_gluons_backward_fits_and_starts_the_products_and_copies_it_should(compiled):
    wide, narrow = compiled["backward"]
    assert max(wide[0], narrow[0]) <= 227 * 1024
    # An instruction takes 16 of the sum. Each consumer: S and dP head_dim / 16, dV and dK
    # queries / 16, dQ 128 / 16. Copies of 64 columns: K and V of each consumer, Q and dO; and two
    # rows of numbers.
    assert wide[1:3] == [2 * (2 * 8 + 2 * 4 + 8), (4 + 2) * 2 + 2]
    assert narrow[1:3] == [2 * (2 * 4 + 2 * 8 + 8), (4 + 2) * 1 + 2]
    assert wide[3] == narrow[3] == 2


def test_fp8_does_not_spill_and_weights_reach_the_second_product_in_their_threads(compiled):
    # Twice, with and without a mask: S takes head_dim / 32 instructions and O 128 / 32. Numbers
    # change their threads only for the maximum and the sum of two rows, in two steps each.
    assert compiled["fp8"] == [[0, 2 * 2, 2 * 4, 16], [0, 2 * (4 + 4), 2 * (4 + 4), 16]]


def test_a_decode_steps_matrices_wait_for_their_input_and_batches_use_tensor_cores(compiled):
    assert compiled["linear"] == {
        "1": [0, False, False, True],
        "8": [0, True, False, True],
        "64": [0, False, True, True],
    }


def test_a_cached_launch_passes_the_arguments_of_the_first_one(compiled):
    plain = ["_attn_fwd", "_bwd_preprocess", "_bwd_dkdv", "_bwd_dq"]
    hopper = ["_hopper_fwd", "_bwd_preprocess", "_hopper_dkdv", "_hopper_dq"]
    gluon = ["_gluon_fwd", "_bwd_preprocess", "_gluon_bwd", "_round"]
    fp8 = ["_quantise"] * 3 + ["_fp8_fwd"]
    assert compiled["launches"] == [*gluon, *plain, *hopper, *fp8]
