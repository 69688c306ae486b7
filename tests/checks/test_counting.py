import pytest
import torch

from labsupport import checks
from labsupport.analysis.traffic import FastMemory, Slow, count
from labsupport.checks import counting
from tests.checks.solutions import broken, diagnosis, solution_source

TEXTBOOK, TILED, CAUSAL = ALL = (
    checks.check_textbook_traffic,
    checks.check_tiled_traffic,
    checks.check_tiled_causal,
)


def source():
    return solution_source("04", "ex-4-2-traffic")


def textbook(*changes):
    return broken(source(), "textbook_traffic", *changes)


def tiled(*changes):
    return broken(source(), "tiled_traffic", *changes)


@pytest.mark.parametrize("seed", [0, 5, 31])
def test_the_solutions_pass(seed, capsys):
    TEXTBOOK(textbook(), seed=seed)
    TILED(tiled(), seed=seed)
    CAUSAL(tiled(), seed=seed)
    assert capsys.readouterr().out.count("[ok]") == 3


def test_the_labs_own_functions_pass():
    TEXTBOOK(checks.textbook_traffic)
    TILED(checks.tiled_traffic)
    CAUSAL(checks.tiled_traffic)


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
        assert tiled()(**case, outside=outside, causal=causal) == seen
        run = count("standard", q, q, q, **blocks)
        seen = sum(run.read.values()), sum(run.written.values())
        assert textbook()(n, d, case["block_q"]) == seen


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


READ = "(matrix + passes * matrix) + square + (square + passes * matrix)"
RETURN = "return read, written"
TEXTBOOK_MISTAKES = {
    "K and V once": ([("passes = seqlen // block_q", "passes = 1")], "for *each* block of rows"),
    "V once": ([("(square + passes * matrix)", "(square + matrix)")], "one of them passes once"),
    "for each row": ([("passes = seqlen // block_q", "passes = seqlen")], "not for each row"),
    "times block_q": ([("passes = seqlen // block_q", "passes = seqlen * block_q")], "do not multiply"),
    "no squares": ([("square, matrix = seqlen**2,", "square, matrix = 0,")], "S and P are missing"),
    "P not read": ([("(square + passes", "(passes")], "missing from what is read"),
    "P not written": ([("= square + square + matrix", "= square + matrix")], "missing from what is written"),
    "no O": ([("+ square + matrix\n", "+ square\n")], "O is missing"),
    "no Q": ([("(matrix + passes * matrix)", "passes * matrix")], "Q is missing"),
    "bytes": ([(RETURN, "return 4 * read, 4 * written")], "count elements"),
    "swapped": ([(RETURN, "return written, read")], "swapped"),
    "added": ([(RETURN, "return read + written, read + written")], "the sum of both"),
    "one value": ([(RETURN, "return read + written")], "return 2 values (read, written), not an int"),
    "text": ([(RETURN, "return f'{read}', written")], "read must be a number, not a str"),
    "a tensor": ([(RETURN, "return torch.tensor([read, written])")], "not a Tensor of shape (2,)"),
    "something else": ([(RETURN, "return read + seqlen, written")], "read is off: a memory that counts sees Q 512"),
}  # fmt: skip
TILED_MISTAKES = {
    "other order": ([('== "queries"', '== "keys"')], "are exchanged"),
    "outside ignored": ([('outside == "queries"', "True")], "count queries outside"),
    "outside ignored, keys": ([('outside == "queries"', "False")], "count keys outside"),
    "K only": ([("tiles * 2 * cols", "tiles * cols"), ("read = 2 * matrix", "read = matrix")], "K *and* V"),
    "K and V once": ([("matrix + tiles * 2 * cols", "3 * matrix")], "each* block of queries"),
    "wrong blocks": ([("rows, cols =", "cols, rows ="), ("2 * block_q)", "2 * block_k)")], "by the other block"),
    "Q again": ([("matrix + tiles * 2 * cols", "tiles * (rows + 2 * cols)")], "a block of Q stays"),
    "no L": ([("written = matrix + seqlen", "written = matrix")], "L is missing"),
    "L wide": ([("written = matrix + seqlen", "written = 2 * matrix")], "not head_dim"),
    "O for each tile": ([("written = matrix + seqlen", "written = tiles * rows + seqlen")], "O stays"),
    "no m and l": ([("+ 2 * block_q", ""), ("+ 2 * seqlen", "")], "m and l are fetched"),
    "no zeros": ([("(matrix + 2 * seqlen) +", "")], "begin with zeros"),
    "O not read": ([("(2 * rows", "(rows")], "has to be read again"),
    "O once": ([("tiles * (rows + 2 * block_q)", "matrix + 2 * seqlen")], "written back for each tile"),
    "Q once": ([("2 * matrix + tiles * (2 * rows", "3 * matrix + tiles * (rows")], "it does not stay"),
    "tiles of S": ([(RETURN, "return read + tiles * block_q * block_k, written + tiles * block_q * block_k")], "S never leaves"),
    "bytes": ([(RETURN, "return 4 * read, 4 * written")], "count elements"),
    "swapped": ([(RETURN, "return written, read")], "swapped"),
    "text": ([(RETURN, "return read, None")], "written must be a number, not a NoneType"),
    "something else": ([(RETURN, "return read, written + 3 * seqlen")], "written is off: a memory that counts sees"),
}  # fmt: skip
CEIL = "sum(math.ceil(stop / block_k) for stop in range(block_q, seqlen + 1, block_q))"
ROWS = "(seqlen // block_q)"
CAUSAL_MISTAKES = {
    "causal ignored": ([("if causal", "if False")], "`causal` is ignored"),
    "half of the tiles": ([(CEIL, "tiles / 2")], "More than half"),
    "tiles below": ([(CEIL, "sum((stop - block_q) // block_k for stop in range(block_q, seqlen + 1, block_q))")], "on the diagonal are missing"),
    "by equal blocks": ([(CEIL, f"{ROWS} * ({ROWS} + 1) // 2")], "holds for square tiles"),
    "first row": ([(CEIL, "sum(row // block_k + 1 for row in range(0, seqlen, block_q))")], "first row"),
    "floor": ([("math.ceil(stop / block_k)", "stop // block_k")], "round up"),
    "pairs": ([(CEIL, "seqlen * (seqlen + 1) / 2 / block_q / block_k")], "count tiles"),
    "reads only": ([("+ tiles * (rows", f"+ {ROWS} * (seqlen // block_k) * (rows")], "would be written, too"),
    "no L": ([("written = matrix + seqlen", "written = matrix")], "L is missing"),
    "something else": ([(CEIL, CEIL + " + 1")], "a memory that counts sees"),
}  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("changes", "said"), TEXTBOOK_MISTAKES.values(), ids=TEXTBOOK_MISTAKES)
def test_each_mistake_in_the_textbooks_count_gets_its_own_diagnosis(changes, said, seed):
    assert said in diagnosis(TEXTBOOK, textbook(*changes), seed=seed)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("changes", "said"), TILED_MISTAKES.values(), ids=TILED_MISTAKES)
def test_each_mistake_in_the_loops_count_gets_its_own_diagnosis(changes, said, seed):
    assert said in diagnosis(TILED, tiled(*changes), seed=seed)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("changes", "said"), CAUSAL_MISTAKES.values(), ids=CAUSAL_MISTAKES)
def test_each_mistake_under_a_mask_gets_its_own_diagnosis(changes, said, seed):
    assert said in diagnosis(CAUSAL, tiled(*changes), seed=seed)


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
