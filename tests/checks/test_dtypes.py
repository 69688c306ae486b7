import pytest
import torch

from labsupport import checks
from labsupport.attention import attention
from tests.checks.solutions import solution_source

DTYPE_CHECKS = [checks.check_half_dtype_values, checks.check_half_dtype_edges]
ALL = [*DTYPE_CHECKS, checks.check_half_attention]


def build(*changes):
    """half_dtype and half_attention of the notebook, with each (old, new) replaced."""
    source = solution_source("01", "ex-1-6-half-precision")
    for old, new in changes:
        assert old in source, f"the solution no longer contains {old!r}"
        source = source.replace(old, new)
    namespace = {"torch": torch, "attention": attention}
    exec(source, namespace)
    return namespace["half_dtype"], namespace["half_attention"]


def diagnosis(half_dtype, half_attention):
    """The message of the first check that fails."""
    with pytest.raises(checks.CheckFailed) as caught:
        for check in DTYPE_CHECKS:
            check(half_dtype)
        checks.check_half_attention(half_attention)
    return str(caught.value)


@pytest.mark.parametrize("seed", [0, 5])
def test_the_solution_passes(seed, capsys):
    half_dtype, half_attention = build()
    for check in DTYPE_CHECKS:
        check(half_dtype, seed=seed)
    checks.check_half_attention(half_attention, seed=seed)
    assert capsys.readouterr().out.count("[ok]") == 3


def test_another_right_way_passes():
    def half_dtype(q, k, v):
        rounded = [x.to(torch.float16) for x in (q, k, v)]
        overflow = any(
            (r.isinf() & x.isfinite()).any() for r, x in zip(rounded, (q, k, v), strict=True)
        )
        mixed = torch.bfloat16 in {q.dtype, k.dtype, v.dtype}
        return torch.bfloat16 if overflow or mixed else torch.float16

    def half_attention(q, k, v):
        dtype = half_dtype(q, k, v)
        return attention(*(x.type(dtype) for x in (q, k, v))).type_as(q)

    for check in DTYPE_CHECKS:
        check(half_dtype)
    checks.check_half_attention(half_attention)


@pytest.mark.parametrize("backend", ["auto", "standard", "flash_torch"])
@pytest.mark.parametrize("seed", [1003, 1040, 1093, *range(8)])
def test_attention_in_half_passes_whatever_ran_and_was_drawn(backend, seed):
    """With the first three seeds the textbook's error is small by luck."""
    half_dtype, _ = build()

    def half_attention(q, k, v):
        dtype = half_dtype(q, k, v)
        return attention(q.to(dtype), k.to(dtype), v.to(dtype), backend=backend).to(q.dtype)

    checks.check_half_attention(half_attention, seed=seed)


def whole(body):
    """half_dtype with another body."""
    namespace = {"torch": torch}
    exec("def half_dtype(q, k, v):\n" + body, namespace)
    return namespace["half_dtype"]


DTYPE_MISTAKES = {
    "everything to float16": ("    return torch.float16", "gives it up"),
    "everything to bfloat16": ("    return torch.bfloat16", "three bits"),
    "the first input decides": (
        "    return torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float16",
        "not at the first only",
    ),
    "float32 stays float32": ("    return q.dtype", "take float16 and bfloat16 only"),
    "no look at the numbers": (
        "    types = {q.dtype, k.dtype, v.dtype}\n"
        "    return torch.bfloat16 if torch.bfloat16 in types else torch.float16",
        "turns into infinity",
    ),
    "the sign forgotten": (
        "    large = max(x[x.isfinite()].max() for x in (q, k, v)) >= 65520\n"
        "    types = {q.dtype, k.dtype, v.dtype}\n"
        "    return torch.bfloat16 if large or torch.bfloat16 in types else torch.float16",
        "abs()",
    ),
    "the scores decide": (
        "    a, b, c = (x.float() for x in (q, k, v))\n"
        "    top = max((a @ b.mT).abs().max(), *(x.abs().max() for x in (a, b, c)))\n"
        "    types = {q.dtype, k.dtype, v.dtype}\n"
        "    large = not top < 65520\n"
        "    return torch.bfloat16 if large or torch.bfloat16 in types else torch.float16",
        "keeps them in float32",
    ),
    "text": ("    return 'float16'", "not the text 'float16'"),
}


@pytest.mark.parametrize("mistake", DTYPE_MISTAKES)
def test_each_mistake_in_the_choice_gets_its_own_diagnosis(mistake):
    body, said = DTYPE_MISTAKES[mistake]
    assert said in diagnosis(whole(body), build()[1])


LIMIT_MISTAKES = {
    "limit too low": ([(">= 65_520", "> 65_504")], "half a step above"),
    "limit missed": ([(">= 65_520", "> 65_520")], "half a step above"),
    "infinite entries count": ([("x[x.isfinite()]", "x")], "look at finite entries only"),
    "a NaN hides the rest": (
        [
            ("x[x.isfinite()]", "x.masked_fill(x.isinf(), 0)"),
            ("(finite.abs() >= 65_520).any()", "finite.abs().max() >= 65_520"),
        ],
        "must not hide the others",
    ),
}


@pytest.mark.parametrize("mistake", LIMIT_MISTAKES)
def test_each_mistake_at_the_limit_gets_its_own_diagnosis(mistake):
    changes, said = LIMIT_MISTAKES[mistake]
    assert said in diagnosis(*build(*changes))


ATTENTION_MISTAKES = {
    "not cast back": ([(".to(q.dtype)", "")], "It came back as the kernel made it"),
    "cast to k's dtype": ([(".to(q.dtype)", ".to(k.dtype)")], "like q"),
    "detached": ([("q.to(dtype)", "q.detach().to(dtype)")], "no gradient reaches q"),
    "all detached": ([("v.to(dtype)).to", "v.to(dtype)).detach().to")], "cut off"),
    "always float16": ([("dtype = half_dtype(q, k, v)", "dtype = torch.float16")], "all finite"),
    "always bfloat16": (
        [("dtype = half_dtype(q, k, v)", "dtype = torch.bfloat16")],
        "was computed in bfloat16",
    ),
    "not cast at all": (
        [("dtype = half_dtype(q, k, v)", "dtype = torch.float32")],
        "Cast q, k and v before",
    ),
    "causal": ([("v.to(dtype))", "v.to(dtype), causal=True)")], "it is causal"),
    "k and v swapped": (
        [("k.to(dtype), v.to(dtype)", "v.to(dtype), k.to(dtype)")],
        "k and v are swapped",
    ),
    "computed in float32, rounded at the end": (
        [("q.to(dtype), k.to(dtype), v.to(dtype)).to", "q.float(), k.float(), v.float()).to(dtype).to")],
        "Cast them before the call",
    ),
    "across heads": (
        [("attention(q.to(dtype), k.to(dtype), v.to(dtype))",
          "attention(*(x.to(dtype).transpose(1, 2) for x in (q, k, v))).transpose(1, 2)")],
        "across heads",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", ATTENTION_MISTAKES)
def test_each_mistake_around_the_kernel_gets_its_own_diagnosis(mistake):
    changes, said = ATTENTION_MISTAKES[mistake]
    assert said in diagnosis(*build(*changes))


def test_a_stub_is_called_one():
    def half_dtype(q, k, v):
        raise NotImplementedError

    with pytest.raises(checks.CheckFailed, match="not written yet"):
        checks.check_half_dtype_values(half_dtype)
