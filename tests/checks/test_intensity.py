import numpy as np
import pytest
import torch

from labsupport import checks
from labsupport.checks import intensity, intensity_mistakes
from tests.checks.solutions import broken, diagnosis, solution_source

FLOPS, BYTES, ROOF = checks.check_cost_flops, checks.check_cost_bytes, checks.check_roof


def source():
    return solution_source("04", "ex-4-1-cost")


def cost(*changes):
    return broken(source(), "attention_cost", *changes)


def roof(*changes):
    return broken(source(), "roof", *changes)


@pytest.mark.parametrize("seed", [0, 5, 31])
def test_the_solutions_pass(seed, capsys):
    FLOPS(cost(), seed=seed)
    BYTES(cost(), seed=seed)
    ROOF(roof(), seed=seed)
    assert capsys.readouterr().out.count("[ok]") == 3


def test_the_labs_own_functions_pass():
    FLOPS(checks.attention_cost)
    BYTES(checks.attention_cost)
    ROOF(checks.roof)


def test_another_right_way_passes():
    """Row by row, tensor by tensor; other kinds of numbers; a list instead of a tuple."""

    def by_rows(batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, *, dtype, causal, backward):
        b, n_q, n_k, h, h_k, d = batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim
        seen = [n_k - n_q + i + 1 if causal else n_k for i in range(n_q)]
        products = 5 if backward else 2
        flops = np.float64(sum(seen)) * 2 * d * products * h * b
        q, k = torch.empty(b, n_q, h, d, dtype=dtype), torch.empty(b, n_k, h_k, d, dtype=dtype)
        tensors = [q, k, k, q, torch.empty(b, n_q, h)]
        tensors += [q, q, k, k] if backward else []
        return [flops, torch.tensor(sum(x.nbytes for x in tensors))]

    def by_the_ridge(flops, moved, tflops, gb_s):
        intensity, ridge = flops / moved, tflops * 1e3 / gb_s
        reached = min(1.0, intensity / ridge) * tflops
        return (
            intensity,
            np.float64(flops / reached / 1e9),
            ["memory", "arithmetic"][intensity > ridge],
        )

    FLOPS(by_rows)
    BYTES(by_rows)
    ROOF(by_the_ridge)


def test_the_mistakes_are_one_step_away_from_the_right_formula():
    for shape in intensity._shapes(3):
        right = checks.attention_cost(**shape)
        assert (intensity_mistakes.flops_with(shape), intensity_mistakes.bytes_with(shape)) == right


HIDDEN = "pairs -= seqlen_q * (seqlen_q - 1) // 2"
FLOP_MISTAKES = {
    "a multiply-add once": ([("(10 if backward else 4)", "(5 if backward else 2)")], "counts as 2 FLOPs"),
    "one product": ([("else 4)", "else 2)")], "two products, Q K^T and P V"),
    "kv_heads": ([("batch * heads * pairs", "batch * kv_heads * pairs")], "count heads, not kv_heads"),
    "no heads": ([("batch * heads * pairs", "batch * pairs")], "multiply by heads"),
    "no batch": ([("batch * heads * pairs", "heads * pairs")], "Multiply by batch"),
    "causal ignored": ([("if causal", "if False")], "`causal` is ignored"),
    "always causal": ([("if causal", "if True")], "only with causal=True"),
    "half": ([(HIDDEN, "pairs /= 2")], "does not hide half"),
    "half of the last square": ([(HIDDEN, "pairs -= seqlen_q**2 / 2")], "The diagonal is visible"),
    "strict": ([("(seqlen_q - 1)", "(seqlen_q + 1)")], "its own position"),
    "top-left": ([(HIDDEN, "pairs = seqlen_q * (seqlen_q + 1) // 2")], "aligned top-left"),
    "queries squared": ([("pairs = seqlen_q * seqlen_k", "pairs = seqlen_q**2")], "not seqlen_q**2"),
    "keys squared": ([("pairs = seqlen_q * seqlen_k", "pairs = seqlen_k**2")], "not seqlen_k**2"),
    "backward ignored": ([("10 if backward", "4 if backward")], "`backward` is ignored"),
    "S not computed again": ([("10 if backward", "8 if backward")], "S = Q K^T once more"),
    "both passes": ([("10 if backward", "14 if backward")], "the backward pass alone"),
    "swapped": ([("return flops, moved", "return moved, flops")], "swapped"),
    "one value": ([("return flops, moved", "return flops")], "return 2 values (flops, moved), not an int"),
    "three values": ([("return flops, moved", "return flops, moved, 1")], "not 3"),
    "text": ([("return flops", "return str(flops)")], "flops must be a number, not a str"),
    "bool": ([("return flops", "return flops > 1")], "flops must be a number, not a bool"),
    "many numbers": ([("return flops", "return torch.ones(2)")], "a Tensor of shape (2,)"),
    "NaN": ([("return flops", "return math.nan")], "flops is NaN"),
    "something else": ([("return flops", "return flops + 1e9")], "is right,"),
}  # fmt: skip
FUSED = "2 * q + 2 * k + lse"
BYTE_MISTAKES = {
    "elements": ([("* dtype.itemsize", "* 1"), ("seqlen_q * 4", "seqlen_q")], "counts numbers"),
    "always 4 bytes": ([("dtype.itemsize", "4")], "always count 4 bytes"),
    "always 2 bytes": ([("dtype.itemsize", "2")], "always count 2 bytes"),
    "heads for K": ([("seqlen_k * kv_heads", "seqlen_k * heads")], "K and V have kv_heads heads"),
    "kv_heads for Q": ([("seqlen_q * heads *", "seqlen_q * kv_heads *")], "Q and O have heads heads"),
    "queries for K": ([("batch * seqlen_k", "batch * seqlen_q")], "K and V have seqlen_k rows"),
    "keys for Q": ([("batch * seqlen_q", "batch * seqlen_k")], "Q and O have seqlen_q rows"),
    "no L": ([("lse = batch", "lse = 0 * batch")], "L is missing"),
    "L in dtype": ([("seqlen_q * 4", "seqlen_q * dtype.itemsize")], "float32 whatever dtype"),
    "L wide": ([("seqlen_q * 4", "seqlen_q * 4 * head_dim")], "not head_dim"),
    "no O": ([("2 * q", "q"), ("4 * q", "3 * q")], "O is missing"),
    "no V": ([(FUSED, "2 * q + k + lse"), ("2 * k + 2 * k", "2 * k + k")], "K and V are two tensors"),
    "scores": ([("    return", "    moved += 2 * batch * heads * seqlen_q * seqlen_k * dtype.itemsize\n    return")], "S and P as well"),
    "K halved": ([("    lse", "    k = k / 2 if causal else k\n    lse")], "no key from every query"),
    "no batch": ([("q = batch *", "q ="), ("k = batch *", "k ="), ("lse = batch *", "lse =")], "Multiply by batch"),
    "backward ignored": ([("if backward else 2 * q", "if False else 2 * q")], "reads O, dO and writes dQ"),
    "no dO": ([("4 * q", "3 * q")], "dO is missing"),
    "no gradients": ([("4 * q + 2 * k + 2 * k", "3 * q + 2 * k")], "dQ, dK and dV are written"),
    "no dK": ([("2 * k + 2 * k", "2 * k")], "dK and dV are missing"),
    "heads for dK": ([("2 * k + 2 * k", "2 * k + 2 * k * heads // kv_heads")], "shape of K and V"),
    "both passes": ([("4 * q + 2 * k + 2 * k + lse", "6 * q + 6 * k + 2 * lse")], "backward pass alone"),
    "text": ([("return flops, moved", "return flops, '5 MB'")], "moved must be a number, not a str"),
    "something else": ([("return flops, moved", "return flops, moved + 64")], "is right,"),
}  # fmt: skip
LONGER = "max(arithmetic, memory)"
ROOF_MISTAKES = {
    "sum": ([(LONGER, "arithmetic + memory")], "added the two times"),
    "shorter": ([(LONGER, "min(arithmetic, memory)")], "take the longer"),
    "arithmetic only": ([(LONGER, "arithmetic")], "time for the bytes is ignored"),
    "memory only": ([(LONGER, "memory")], "time for the FLOPs is ignored"),
    "seconds": ([(LONGER, f"{LONGER} / 1e3")], "in seconds"),
    "microseconds": ([(LONGER, f"{LONGER} * 1e3")], "in microseconds"),
    "binary": ([("gb_s * 1e9", "gb_s * 2**30")], "10^9 bytes"),
    "upside down": ([("return flops / moved", "return moved / flops")], "turn it over"),
    "another intensity": ([("return flops / moved", "return flops")], "It is flops / moved"),
    "the other ceiling": ([("arithmetic > memory", "arithmetic < memory")], "What takes longer"),
    "always memory": ([("arithmetic > memory", "False")], "You say so in every case"),
    "another word": ([('"arithmetic"', '"compute"')], 'bound_by is "arithmetic" or "memory", not \'compute\''),
    "a bool for a word": ([(LONGER + ", bound_by", LONGER + ", bound_by == 'memory'")], "not a bool"),
    "two values": ([(", bound_by\n", "\n")], "return 3 values"),
    "text": ([(LONGER, f"str({LONGER})")], "least_ms must be a number"),
}  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("changes", "said"), FLOP_MISTAKES.values(), ids=FLOP_MISTAKES)
def test_each_mistake_in_the_flops_gets_its_own_diagnosis(changes, said, seed):
    assert said in diagnosis(FLOPS, cost(*changes), seed=seed)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("changes", "said"), BYTE_MISTAKES.values(), ids=BYTE_MISTAKES)
def test_each_mistake_in_the_bytes_gets_its_own_diagnosis(changes, said, seed):
    assert said in diagnosis(BYTES, cost(*changes), seed=seed)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("changes", "said"), ROOF_MISTAKES.values(), ids=ROOF_MISTAKES)
def test_each_mistake_under_the_roof_gets_its_own_diagnosis(changes, said, seed):
    assert said in diagnosis(ROOF, roof(*changes), seed=seed)


def test_a_wrong_number_of_bytes_does_not_fail_the_flops():
    FLOPS(cost(("2 * q", "7 * q")))
    BYTES(cost(("10 if", "12 if")))


def test_a_number_learnt_by_heart_does_not_pass():
    def by_heart(*shape, **options):
        return 4 * 512 * 512 * 64, 4 * 512 * 64 * 2

    diagnosis(FLOPS, by_heart)
    diagnosis(BYTES, by_heart)


@pytest.mark.parametrize("check", [FLOPS, BYTES, ROOF])
def test_a_stub_is_called_one(check):
    def attention_cost(*shape, **options):
        raise NotImplementedError

    assert "not written yet" in diagnosis(check, attention_cost)


@pytest.mark.parametrize("check", [FLOPS, BYTES, ROOF])
def test_a_function_that_stumbles_is_told_on_what_it_was_called(check):
    assert "It was called with" in diagnosis(check, lambda: 0)
