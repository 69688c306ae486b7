import pytest
import torch

from labsupport import checks
from tests.checks.solutions import function, solution_source

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


def diagnosis(name, body):
    with pytest.raises(checks.CheckFailed) as caught:
        CHECKS[name](written(name, body))
    return str(caught.value)


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


CUT = """\
widths = [h * qkv.shape[-1] // (heads + 2 * kv_heads) for h in (heads, kv_heads, kv_heads)]
    q, k, v = (x.unflatten(-1, (h, -1)) for x, h in zip(qkv.split(widths, -1), (heads, kv_heads, kv_heads)))
    """
THIRDS = """\
parts = zip(qkv.chunk(3, -1), (heads, kv_heads, kv_heads))
    return tuple(x.unflatten(-1, (h, -1)) for x, h in parts)"""

MISTAKES = {
    "heads viewed before positions": (
        "split_heads",
        "return x.view(x.shape[0], heads, x.shape[1], -1).transpose(1, 2)",
        "leave the first two alone",
    ),
    "heads inside": (
        "split_heads",
        "return x.view(x.shape[0], x.shape[1], -1, heads).transpose(2, 3)",
        "heads-th number",
    ),
    "Transformers' layout": (
        "split_heads",
        "return x.view(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)",
        "This is (batch, heads, seqlen, head_dim)",
    ),
    "Transformers' shape by view": (
        "split_heads",
        "return x.reshape(x.shape[0], heads, x.shape[1], -1)",
        "Transformers' order",
    ),
    "head_dim before heads": (
        "split_heads",
        "return x.unflatten(-1, (-1, heads))",
        "The last two dimensions are swapped",
    ),
    "heads copied": (
        "split_heads",
        "return torch.stack(x.chunk(heads, -1), 2)",
        "they were copied",
    ),
    "nothing returned": ("split_heads", "x.unflatten(-1, (heads, -1))", "`return`"),
    "view for transpose": (
        "to_flash_layout",
        "b, h, n, d = x.shape; return x.reshape(b, n, h, d)",
        "Swap two dimensions",
    ),
    "left as it is": ("to_flash_layout", "return x", "Transformers' layout"),
    "wrong two dimensions": ("to_flash_layout", "return x.transpose(2, 3)", "last two dimensions"),
    "batch moved": ("to_flash_layout", "return x.transpose(0, 1)", "batch and heads"),
    "contiguous": ("to_flash_layout", "return x.transpose(1, 2).contiguous()", "they were copied"),
    "order k, q, v": ("split_qkv", CUT + "return k, q, v", "the numbers of k"),
    "k and v swapped": ("split_qkv", CUT + "return q, v, k", "the order is q, k, v"),
    "equal thirds": ("split_qkv", THIRDS, "not equally wide"),
    "head by head": (
        "split_qkv",
        "x = qkv.unflatten(-1, (kv_heads, heads // kv_heads + 2, -1))\n"
        "    g = heads // kv_heads\n"
        "    return tuple(t.flatten(2, 3) for t in x.split((g, 1, 1), 3))",
        "head by head",
    ),
    "every third number": (
        "split_qkv",
        "return qkv.unflatten(-1, (heads, -1, 3)).unbind(-1)",
        "every third number",
    ),
    "q, k, v in Transformers' layout": (
        "split_qkv",
        CUT + "return tuple(x.transpose(1, 2) for x in (q, k, v))",
        "This is (batch, heads, seqlen, head_dim)",
    ),
    "keys repeated": (
        "split_qkv",
        CUT + "g = heads // kv_heads\n"
        "    return (q, k, v) if g == 1 else (q, k.repeat_interleave(g, 2), v.repeat_interleave(g, 2))",
        "repeated to q's number of heads",
    ),
    "one tensor": ("split_qkv", "return qkv", "3 values"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "body", "said"), MISTAKES.values(), ids=MISTAKES)
def test_each_mistake_gets_its_own_diagnosis(name, body, said):
    assert said in diagnosis(name, body)


def test_a_wrong_result_without_a_known_mistake_says_where_it_is_wrong():
    assert "entries are wrong" in diagnosis("to_flash_layout", "return x.transpose(1, 2).flip(1)")


def test_a_stub_is_called_one():
    with pytest.raises(checks.CheckFailed, match="not written yet"):
        checks.check_split_qkv(written("split_qkv", "raise NotImplementedError"))


def test_views_are_judged_by_their_memory_not_by_their_strides():
    # What a model passes is often a transposed view already: then .contiguous() copies nothing.
    x = torch.randn(2, 6, 3, 4).transpose(1, 2)
    flash = solved("to_flash_layout")(x)
    assert flash.is_contiguous()
    assert flash.data_ptr() == x.data_ptr()
