import numpy as np
import pytest
import torch

from labsupport import checks
from labsupport.checks import intensity
from labsupport.checks.verdict import Mistake, mutant
from labsupport.profiling.cases import Case
from labsupport.profiling.work import passes_of
from tests.checks.solutions import diagnosis, each, function, solution_source

FLOPS, BYTES, ROOF = checks.check_cost_flops, checks.check_cost_bytes, checks.check_roof


@pytest.mark.parametrize("seed", [0, 5, 31])
def test_the_solutions_pass(seed, capsys):
    source = solution_source("04", "ex-4-1-cost")
    FLOPS(function(source, "attention_cost"), seed=seed)
    BYTES(function(source, "attention_cost"), seed=seed)
    ROOF(function(source, "roof"), seed=seed)
    assert capsys.readouterr().out.count("[ok]") == 3


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


def test_the_reference_counts_as_the_labs_measurements_do():
    for shape in intensity._shapes(3):
        options = {**shape, "dtype": str(shape["dtype"]).removeprefix("torch.")}
        options["seqlen"], options["kv_seqlen"] = options.pop("seqlen_q"), options.pop("seqlen_k")
        backward = options.pop("backward")
        case = Case(backend="", direction="forward+backward", **options)
        one = passes_of(case)[backward]
        assert checks.attention_cost(**shape) == (one.flops, one.bytes)


RETURN = "return flops, moved"
OTHER_FLOPS = (
    Mistake((RETURN, "return flops"), "return 2 values (flops, moved), not an int"),
    Mistake((RETURN, "return flops, moved, 1"), "not 3"),
    Mistake((RETURN, "return str(flops), moved"), "flops must be a number, not a str"),
    Mistake((RETURN, "return flops > 1, moved"), "flops must be a number, not a bool"),
    Mistake((RETURN, "return torch.ones(2), moved"), "a Tensor of shape (2,)"),
    Mistake((RETURN, "return float('nan'), moved"), "flops is NaN"),
    Mistake((RETURN, "return flops + 1e9, moved"), "is right,"),
)
OTHER_BYTES = (
    Mistake((RETURN, "return flops, '5 MB'"), "moved must be a number, not a str"),
    Mistake((RETURN, "return flops, moved + 64"), "is right,"),
)
LONGER = "max(arithmetic, memory)"
OTHER_ROOFS = (
    Mistake(("flops / moved", "flops"), "It is flops / moved"),
    Mistake(("arithmetic >= memory", "arithmetic < memory"), "The longer time is the bound"),
    Mistake(("arithmetic >= memory", "False"), "You say so in every case"),
    Mistake(
        ("by = ARITHMETIC", "by = 'compute'"),
        'bound_by is "arithmetic" or "memory", not \'compute\'',
    ),
    Mistake((LONGER + ", by", LONGER + ", by == MEMORY"), "not a bool"),
    Mistake((LONGER + ", by", LONGER), "return 3 values"),
    Mistake((LONGER, f"str({LONGER})"), "least_ms must be a number"),
)


@pytest.mark.parametrize("seed", [0, 1])
@each(
    (FLOPS, intensity.attention_cost, intensity.FLOP_MISTAKES + OTHER_FLOPS),
    (BYTES, intensity.attention_cost, intensity.BYTE_MISTAKES + OTHER_BYTES),
    (ROOF, intensity.roof, intensity.INTENSITY_MISTAKES + intensity.TIME_MISTAKES + OTHER_ROOFS),
)
def test_each_mistake_gets_its_own_diagnosis(check, student, said, seed):
    assert said in diagnosis(check, student, seed=seed)


def test_a_wrong_number_of_bytes_does_not_fail_the_flops():
    FLOPS(mutant(intensity.attention_cost, ("2 * q", "7 * q")))
    BYTES(mutant(intensity.attention_cost, ("10 if", "12 if")))


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
