import pytest
import torch

from labsupport import checks
from labsupport.checks import layout
from labsupport.checks.verdict import Mistake
from tests.checks.solutions import diagnosis, each, function, solution_source

CHECKS = {
    "split_heads": checks.check_split_heads,
    "to_flash_layout": checks.check_flash_layout,
    "split_qkv": checks.check_split_qkv,
}


def solved(name):
    return function(solution_source("02", "ex-2-1-layout"), name)


def written(name, body):
    """The function `name` with this body; its arguments are those of the exercise."""
    arguments = {"split_heads": "x, heads", "to_flash_layout": "x"}.get(
        name, "qkv, heads, kv_heads"
    )
    return function(f"def {name}({arguments}):\n    {body}", name)


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("seed", [0, 5])
def test_the_solution_passes(name, seed, capsys):
    CHECKS[name](solved(name), seed=seed)
    assert capsys.readouterr().out.startswith("[ok]")


OTHER_WAYS = {
    "split_heads": [
        "return x.view(x.shape[0], x.shape[1], heads, -1)",
        "return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)",
        "return x.view(*x.shape[:-1], heads, -1).transpose(1, 2).transpose(1, 2)",
    ],
    "to_flash_layout": ["return x.permute(0, 2, 1, 3)", "return x.movedim(1, 2)"],
    "split_qkv": [
        "d = qkv.shape[-1] // (heads + 2 * kv_heads)\n"
        "    x = qkv.unflatten(-1, (heads + 2 * kv_heads, d))\n"
        "    return x[:, :, :heads], x[:, :, heads:heads + kv_heads], x[:, :, heads + kv_heads:]",
        "return qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).split((heads, kv_heads, kv_heads), 2)",
    ],
}


@pytest.mark.parametrize(
    ("name", "body"), [(name, body) for name, bodies in OTHER_WAYS.items() for body in bodies]
)
def test_other_right_ways_pass(name, body):
    CHECKS[name](written(name, body))


OTHER_CUTS = (
    Mistake(("return q, k, v", "return q, v, k"), "the order is q, k, v"),
    Mistake(("qkv.split(widths, dim=-1)", "qkv.chunk(3, -1)"), "not equally wide"),
    Mistake(("return q, k, v", "return qkv"), "3 values"),
)


@each(
    (checks.check_split_heads, layout.split_heads, layout.HEAD_MISTAKES),
    (checks.check_flash_layout, layout.to_flash_layout, layout.FLASH_MISTAKES),
    (checks.check_split_qkv, layout.split_qkv, layout.QKV_MISTAKES + OTHER_CUTS),
)
def test_each_mistake_gets_its_own_diagnosis(check, student, said):
    assert said in diagnosis(check, student)


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        ("split_heads", "return torch.stack(x.chunk(heads, -1), 2)", "they were copied"),
        ("split_heads", "x.unflatten(-1, (heads, -1))", "`return`"),
        ("to_flash_layout", "return x.transpose(1, 2).contiguous()", "they were copied"),
        ("to_flash_layout", "return x.transpose(1, 2).flip(1)", "entries are wrong"),
    ],
)
def test_copies_and_unknown_mistakes_are_refused_too(name, body, said):
    assert said in diagnosis(CHECKS[name], written(name, body))


def test_a_stub_is_called_one():
    with pytest.raises(checks.CheckFailed, match="not written yet"):
        checks.check_split_qkv(written("split_qkv", "raise NotImplementedError"))


def test_views_are_judged_by_their_memory_not_by_their_strides():
    # What a model passes is often a transposed view already: then .contiguous() copies nothing.
    x = torch.randn(2, 6, 3, 4).transpose(1, 2)
    flash = solved("to_flash_layout")(x)
    assert flash.is_contiguous()
    assert flash.data_ptr() == x.data_ptr()
