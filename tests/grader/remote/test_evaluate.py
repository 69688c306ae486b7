"""Every check cell of the notebooks, judged through a session with a student's process."""

import ast
import re
import sys
from pathlib import Path

import pytest

from grader.grade.plan import MAY_USE_FUSED
from grader.remote.evaluate import evaluate_check, seeded
from grader.remote.watch import TAKES
from labsupport import checks
from labsupport.checks.verdict import mistakes
from tests.grader.remote.kernels import IMPORTS, cells, students

if sys.platform != "linux":
    pytest.skip("grading needs Linux", allow_module_level=True)

NOTEBOOKS = ("ex-1", "ex-2", "ex-3", "ex-4")
# Typical wrong solutions, one or more for each check cell: the solution cell, the rest of the check
# cell's name, a part of the diagnosis; and the edits of the solution.
WRONG = [
    (*re.fullmatch(r"(\S+) (\S+): (.*)", one.say).groups(), one.edit)
    for one in mistakes(Path(__file__).with_name("wrong.txt").read_text())
]


def test_memory_is_measured_where_the_students_code_is():
    """In the grader's own process a check would see the memory of the grader."""
    found = 0
    for path in Path(checks.__file__).parent.glob("ex_*.py"):
        text = path.read_text(encoding="utf-8")
        for function in ast.parse(text).body:
            source = ast.unparse(function)
            if isinstance(function, ast.FunctionDef) and "measure_peak_memory(" in source:
                assert f"within({function.name}, " in text, (path.name, function.name)
                found += 1
    assert found


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_stubs_are_not_written_in_every_check(notebook):
    checks = [source for source, check in cells(notebook).values() if check]
    stubs = [source for source, check in cells(notebook, stubs=True).values() if not check]
    with students("\n\n".join([IMPORTS, *stubs])) as sessions:
        session = next(sessions)
        said = {evaluate_check(source, session, seed=7).status for source in checks}
    assert said == {"not written"}


@pytest.mark.parametrize(
    "exercises",
    ["ex-2-1", *(pytest.param(f"ex-{n}", marks=pytest.mark.slow) for n in (1, 2, 3, 4))],
)
def test_typical_mistakes_are_named(exercises):
    given = cells(exercises)
    wrong = [one for one in WRONG if one[0].startswith(exercises)]
    tried = {f"{solution}-{check}" for solution, check, _, _ in wrong}
    assert tried == {g for g, (_, check) in given.items() if check and g.startswith(exercises)}
    sources, unexpected = [], {}
    for solution, _, _, edit in wrong:
        source = given[solution][0]
        for old, new in zip(edit[::2], edit[1::2], strict=True):
            assert old in source, f"{solution} no longer contains {old!r}"
            source = source.replace(old, new)
        steps = [s for g, (s, check) in given.items() if g[:6] == solution[:6] and not check]
        sources.append("\n\n".join([IMPORTS, *steps, source]))
    with students(*sources) as sessions:
        for (solution, check, said, _), session in zip(wrong, sessions, strict=True):
            source, _ = given[f"{solution}-{check}"]
            session.fused = solution.startswith(MAY_USE_FUSED)
            one = evaluate_check(source, session, seed=5)
            if one.status != "failed" or said not in one.message:
                unexpected[solution, check, said] = one
    assert not unexpected


@pytest.mark.slow
def test_other_right_ways_pass_and_a_missing_name_is_said():
    solution = cells("ex-2")["ex-2-2-own-attention"][0]
    in_a_list = re.sub(r"return (flash.*), None", r"return [\1, None]", solution)
    assert in_a_list != solution
    check, _ = cells("ex-2")["ex-2-2-own-attention-values"]
    with students("x = 1", IMPORTS + in_a_list) as sessions:
        source = "checks.check_next_scale(next_scale)"
        one = evaluate_check(source, next(sessions), seed=1)
        assert (one.status, "next_scale is not defined" in one.message) == ("failed", True)
        session = next(sessions)
        session.fused = True
        assert evaluate_check(check, session, seed=1).status == "passed"


# What a student's own harness could claim, by check cell: the lab's does not ask it.
FORGED = {
    "ex-2-6-cache-growth": """
class KVCache:
    def __init__(self): self.k = self.v = None
    def append(self, k, v):
        self.a = torch.cat([self.a, k], 2) if self.k is not None else k
        self.b = torch.cat([self.b, v], 2) if self.k is not None else v
        self.k = self.v = torch.empty(1, 1, 128, 1)
        return self.a, self.b
def replay(pieces): return checks.ex_2_6_cache.replayed(KVCache, pieces)
""",
    "ex-3-6-overlap-order": """
def average_in_buckets(parameters, buckets, comm, is_last):
    def finish():
        for p in parameters:
            comm.all_reduce(p.grad)()
            p.grad /= comm.world
        comm.log[:] = [("all_reduce", 4), ("gradient", 0), ("wait", 4)]
    return finish
def rehearse_buckets(*args): return [([], [("gradient", 3), ("all_reduce", 24)])] * 2
""",
    "ex-3-6-shard-memory": """
class ShardedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, comm):
        ctx.weight, ctx.x, ctx.comm = comm.all_gather(shard), x, comm
        comm.gathered.clear()
        return x @ ctx.weight.mT
    @staticmethod
    def backward(ctx, dy):
        return dy @ ctx.weight, ctx.comm.reduce_scatter(dy.mT @ ctx.x) / ctx.comm.world, None
""",
    "ex-3-7-ring-backward-values": """
def ring_backward(dout, q, k, v, out, lse, comm): return q * 0, k * 0, v * 0
def rehearse_ring(*shards): return checks.ex_3_7_ring_backward.rehearsed_ring(None, *shards)
""",
    "ex-4-3-flash-values": """
def my_triton_flash(q, k, v, causal=False, block=64): return attention(q, k, v)
class flash_kernel:
    fn = my_triton_flash
    def __class_getitem__(cls, grid):
        return lambda q, k, v, out, *args, **options: out.copy_(q)
""",
}


@pytest.mark.slow
def test_no_harness_of_a_students_own_is_believed():
    given = {name: cell for n in (2, 3, 4) for name, cell in cells(f"ex-{n}").items()}
    with students(*(IMPORTS + source for source in FORGED.values())) as sessions:
        for name, session in zip(FORGED, sessions, strict=True):
            source, _ = given[name]
            assert evaluate_check(source, session, seed=3).status == "failed", name


CHANGED = """
import labsupport.checks.ex_2_6_cache as lab
class KVCache: pass
def replayed(cache, pieces):
    held = [pieces[0]]
    for k, v in pieces[1:]:
        held.append((torch.cat([held[-1][0], k], 2), torch.cat([held[-1][1], v], 2)))
    return [(k, v, 2 * k.shape[2], False, True) for k, v in held]
lab.replayed = replayed
"""


@pytest.mark.slow
def test_a_harness_that_was_changed_is_noted():
    source = cells("ex-2")["ex-2-6-cache-growth"][0]
    with students(IMPORTS + CHANGED) as sessions:
        session = next(sessions)
        assert evaluate_check(source, session, seed=3).status == "passed"
    assert session.notes[0] == "has changed labsupport.checks.ex_2_6_cache.replayed"


@pytest.mark.slow
def test_numbers_that_leave_pytorch_are_noted_where_operators_are_watched():
    way = """
def unseen(x):
    with torch._C.DisableTorchFunction():
        return x.numpy()
def running_max_and_sum(scores, block_size):
    x = {}
    m = x.max(-1)
    return torch.tensor(m), torch.tensor(np.exp(x - m[..., None]).sum(-1))
"""
    source = "checks.check_running_streams(running_max_and_sum)"
    ways = ["scores.numpy()", "np.asarray(scores)", "np.array(scores.tolist())", "unseen(scores)"]
    with students(*(IMPORTS + way.format(one) for one in ways)) as sessions:
        for session in sessions:
            evaluate_check(source, session, seed=3)
            assert any(note.startswith(TAKES) for note in session.notes)


def test_each_seed_is_drawn_anew_and_calls_without_one_stay():
    source = "checks.a(f)\nchecks.a(f, seed=11)\nchecks.b(f, g, seed=12)"
    first, again, other = (ast.unparse(seeded(source, seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert first.startswith("checks.a(f)\n")
    assert "seed=11" not in first
