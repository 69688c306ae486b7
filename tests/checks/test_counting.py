import pytest
import torch

from labsupport import checks
from labsupport.analysis.traffic import FastMemory, Slow, count
from labsupport.checks import counting
from labsupport.checks.verdict import Mistake
from tests.checks.solutions import diagnosis, each, function, solution_source

TEXTBOOK, TILED, CAUSAL = ALL = (
    checks.check_textbook_traffic,
    checks.check_tiled_traffic,
    checks.check_tiled_causal,
)


@pytest.mark.parametrize("seed", [0, 5, 31])
def test_the_solutions_pass(seed, capsys):
    source = solution_source("04", "ex-4-2-traffic")
    TEXTBOOK(function(source, "textbook_traffic"), seed=seed)
    TILED(function(source, "tiled_traffic"), seed=seed)
    CAUSAL(function(source, "tiled_traffic"), seed=seed)
    assert capsys.readouterr().out.count("[ok]") == 3


def test_another_right_way_passes():
    """Loops that count as they go, in other kinds of numbers."""

    def three_kernels(seqlen, head_dim, block_q):
        read = written = 0.0
        for _ in range(0, seqlen, block_q):
            read += block_q * head_dim + seqlen * head_dim
            written += block_q * seqlen
        for _ in range(seqlen):
            read, written = read + seqlen, written + seqlen
        for _ in range(0, seqlen, block_q):
            read += block_q * seqlen + seqlen * head_dim
            written += block_q * head_dim
        return [read, written]

    def two_loops(seqlen, head_dim, block_q, block_k, *, outside, causal=False):
        read = written = torch.tensor(0)
        q, k = block_q * head_dim, block_k * head_dim
        if outside == "keys":
            written = written + seqlen * (head_dim + 2)
            for start in range(0, seqlen, block_k):
                read = read + 2 * k
                for row in range(0, seqlen, block_q):
                    if causal and row + block_q - 1 < start:
                        continue
                    read, written = read + 2 * q + 2 * block_q, written + q + 2 * block_q
            return read, written
        for row in range(0, seqlen, block_q):
            read, written = read + q, written + q + block_q
            for start in range(0, seqlen, block_k):
                read = read + (0 if causal and start > row + block_q - 1 else 2 * k)
        return read, written

    TEXTBOOK(three_kernels)
    TILED(two_loops)
    CAUSAL(two_loops)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("outside", counting.VERSIONS)
def test_what_the_checks_expect_is_what_a_memory_that_counts_sees(outside, causal):
    for case in counting._sizes(0)[:2]:
        n, d = case["seqlen"], case["head_dim"]
        q = torch.randn(n, d, dtype=torch.float64)
        blocks = {"block_q": case["block_q"], "block_k": case["block_k"]}
        run = count(counting.VERSIONS[outside], q, q, q, causal=causal, **blocks)
        seen = sum(run.read.values()), sum(run.written.values())
        assert checks.tiled_traffic(**case, outside=outside, causal=causal) == seen
        run = count("standard", q, q, q, **blocks)
        seen = sum(run.read.values()), sum(run.written.values())
        assert checks.textbook_traffic(n, d, case["block_q"]) == seen


def test_a_loop_that_a_student_runs_in_a_memory_that_counts_agrees_too():
    """Queries outside, with the whole softmax of a row at once: only what passes counts."""
    q, k, v = (Slow(name, torch.randn(64, 8)) for name in "QKV")
    out, lse = Slow("O", torch.zeros(64, 8)), Slow("L", torch.zeros(64))
    with FastMemory() as chip:
        for i in range(0, 64, 8):
            rows, scores, values = chip.load(q[i : i + 8]), [], []
            for j in range(0, 64, 16):
                scores.append(rows @ chip.load(k[j : j + 16]).T)
                values.append(chip.load(v[j : j + 16]))
            s = torch.cat(scores, 1)
            chip.store(out[i : i + 8], s.softmax(1) @ torch.cat(values))
            chip.store(lse[i : i + 8], s.logsumexp(1))
    seen = chip.read.total(), chip.written.total()
    assert checks.tiled_traffic(64, 8, 8, 16, outside="queries") == seen


RETURN = "return read, written"
OTHER_TEXTBOOK = (
    Mistake((RETURN, "return read + written"), "return 2 values (read, written), not an int"),
    Mistake((RETURN, "return f'{read}', written"), "read must be a number, not a str"),
    Mistake(
        (RETURN, "import torch; return torch.tensor([read, written])"), "not a Tensor of shape (2,)"
    ),
    Mistake(
        (RETURN, "return read + seqlen, written"), "read is off: a memory that counts sees Q 512"
    ),
)
OTHER_TILED = (
    Mistake((RETURN, "return read, None"), "written must be a number, not a NoneType"),
    Mistake(
        (RETURN, "return read, written + 3 * seqlen"), "written is off: a memory that counts sees"
    ),
)


@pytest.mark.parametrize("seed", [0, 1])
@each(
    (TEXTBOOK, counting.textbook_traffic, counting.TEXTBOOK_MISTAKES + OTHER_TEXTBOOK),
    (TILED, counting.tiled_traffic, counting.TILED_MISTAKES + OTHER_TILED),
    (CAUSAL, counting.tiled_traffic, counting.CAUSAL_MISTAKES + OTHER_TILED),
)
def test_each_mistake_gets_its_own_diagnosis(check, student, said, seed):
    assert said in diagnosis(check, student, seed=seed)


@pytest.mark.parametrize("seed", range(8))
def test_the_theorem_in_place_of_a_count_does_not_pass(seed):
    def theorem(seqlen, head_dim, block_q, block_k, *, outside, causal=False):
        return 2 * seqlen**2 * head_dim // block_q, seqlen * head_dim

    diagnosis(TILED, theorem, seed=seed)


@pytest.mark.parametrize("check", ALL)
def test_a_stub_is_called_one(check):
    def traffic(*sizes, **options):
        raise NotImplementedError

    assert "not written yet" in diagnosis(check, traffic)


@pytest.mark.parametrize("check", ALL)
def test_a_function_that_stumbles_is_told_on_what_it_was_called(check):
    assert "It was called with" in diagnosis(check, lambda: 0)
