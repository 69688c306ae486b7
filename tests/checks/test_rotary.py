import pytest
import torch

from labsupport import checks
from labsupport.attention.rotary import apply_rotary_emb, permute_rotary_rows
from labsupport.attention.rotary import rotary_angles as labs_angles
from tests.checks.solutions import broken, function, solution_source


def source():
    return solution_source("03", "ex-3-1-rotary")


NAMES = ("rotary_angles", "apply_rope", "pairs_to_halves")
CHECKS = dict(
    zip(
        NAMES,
        (checks.check_rope_angles, checks.check_rope_values, checks.check_rope_conventions),
        strict=True,
    )
)


def solved(name, *changes):
    return broken(source(), name, *changes)


def diagnosis(check, *students):
    with pytest.raises(checks.CheckFailed) as caught:
        check(*students)
    return str(caught.value)


@pytest.mark.parametrize("seed", [0, 5, 8])
def test_the_solutions_pass(seed, capsys):
    for name, check in CHECKS.items():
        check(solved(name), seed=seed)
    checks.check_rope_positions(solved("rotary_angles"), solved("apply_rope"), seed=seed)
    assert capsys.readouterr().out.count("[ok]") == 4


def test_the_labs_own_functions_pass():
    def angles(positions, head_dim, base=10_000.0):
        return labs_angles(positions, head_dim, base=base)

    def to_halves(weight, heads):
        return permute_rotary_rows(weight, heads, to_interleaved=False)

    checks.check_rope_angles(angles)
    checks.check_rope_values(apply_rotary_emb)
    checks.check_rope_positions(angles, apply_rotary_emb)
    checks.check_rope_conventions(to_halves)


def test_other_right_ways_pass():
    """As many models write it: float32 angles, and a `rotate_half`; rows by an index."""

    def angles(positions, head_dim, base=10_000.0):
        inverse = 1.0 / base ** (torch.arange(0, head_dim, 2).float() / head_dim)
        table = torch.outer(positions.float(), inverse)
        return torch.cos(table), torch.sin(table)

    def apply(x, cos, sin):
        wide = x.to(torch.float32)
        half = x.shape[-1] // 2
        rotated = torch.cat((-wide[..., half:], wide[..., :half]), dim=-1)
        cos, sin = (torch.cat((t, t), dim=-1).unsqueeze(1) for t in (cos, sin))
        return (wide * cos + rotated * sin).to(x.dtype)

    def to_halves(weight, heads):
        head_dim = len(weight) // heads
        one = list(range(0, head_dim, 2)) + list(range(1, head_dim, 2))
        return weight[[head * head_dim + row for head in range(heads) for row in one]]

    checks.check_rope_angles(angles)
    checks.check_rope_values(apply)
    checks.check_rope_positions(angles, apply)
    checks.check_rope_conventions(to_halves)


def test_complex_numbers_are_a_right_way_too():
    def apply(x, cos, sin):
        first, second = x.float().chunk(2, dim=-1)
        result = torch.complex(first, second) * torch.complex(cos, sin)[None, :, None]
        return torch.cat((result.real, result.imag), dim=-1).type_as(x)

    checks.check_rope_values(apply)
    checks.check_rope_positions(solved("rotary_angles"), apply)


EXPONENT, ANGLES = "base ** (-exponents / head_dim)", "angles = positions[:, None] * frequencies"
COS_SIN = "return angles.cos().float(), angles.sin().float()"
ANGLE_MISTAKES = {
    "exponent i/d": ([(EXPONENT, "base ** (-exponents / 2 / head_dim)")], "exponent is -i / head_dim"),
    "exponent 4i/d": ([(EXPONENT, "base ** (-exponents / (head_dim // 2))")], "by the whole head_dim"),
    "exponent to -1": (
        [(EXPONENT, "base ** -torch.linspace(0, 1, head_dim // 2, dtype=torch.float64)")],
        "ends at -1",
    ),
    "no minus": ([(EXPONENT, "base ** (exponents / head_dim)")], "lacks its minus"),
    "reversed": ([(EXPONENT, EXPONENT + ".flip(0)")], "order is reversed"),
    "base ignored": ([(EXPONENT, "10_000 ** (-exponents / head_dim)")], "`base` is ignored"),
    "base not given": ([("base=10_000.0", "base=500_000.0")], "base not given"),
    "from 1": ([("positions[:, None]", "(positions[:, None] + 1)")], "start at 1"),
    "counted": ([("positions[:, None]", "torch.arange(len(positions))[:, None]")], "are ignored"),
    "2 pi": ([("* frequencies", "* frequencies * 2 * math.pi")], "2 pi"),
    "degrees": ([("* frequencies", "* frequencies * math.pi / 180")], "degrees"),
    "swapped": ([(COS_SIN, "return angles.sin().float(), angles.cos().float()")], "are swapped"),
    "negative": ([("* frequencies", "* -frequencies")], "sign of the angle"),
    "a column for each number": (
        [(COS_SIN, "angles = torch.cat((angles, angles), -1)\n    " + COS_SIN)],
        "each has one angle",
    ),
    "float64": ([(COS_SIN, "return angles.cos(), angles.sin()")], "float32"),
    "16 bits": ([(COS_SIN, "return angles.cos().bfloat16(), angles.sin().bfloat16()")], "cannot count"),
    "angles in 16 bits": (
        [(ANGLES, "angles = positions.bfloat16()[:, None] * frequencies.bfloat16()"), ("angles.cos()", "angles.float().cos()"), ("angles.sin()", "angles.float().sin()")],
        "computed in bfloat16",
    ),
    "one value": ([(COS_SIN, "return angles.cos().float()")], "2 values"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), ANGLE_MISTAKES.values(), ids=ANGLE_MISTAKES)
def test_each_mistake_in_the_angles_gets_its_own_diagnosis(changes, said):
    assert said in diagnosis(checks.check_rope_angles, solved("rotary_angles", *changes))


FIRST, SECOND = "first * cos - second * sin", "second * cos + first * sin"
SPLIT, JOIN = "first, second = x.float().chunk(2, dim=-1)", "torch.cat(turned, dim=-1)"
TABLES = "cos[:, None, :], sin[:, None, :]"
INTERLEAVE = "torch.stack(turned, dim=-1).flatten(-2)"
TURN_MISTAKES = {
    "neighbours": (
        [(SPLIT, "first, second = x.float()[..., 0::2], x.float()[..., 1::2]"), (JOIN, INTERLEAVE)],
        "Your pairs are neighbours",
    ),
    "halves in, neighbours out": ([(JOIN, INTERLEAVE)], "result interleaves"),
    "other way": ([(FIRST, "first * cos + second * sin"), (SECOND, "second * cos - first * sin")], "other way round"),
    "both plus": ([(FIRST, "first * cos + second * sin")], "no rotation"),
    "both minus": ([(SECOND, "second * cos - first * sin")], "minus too many"),
    "cos only": ([(FIRST, "first * cos"), (SECOND, "second * cos")], "Only the cosines"),
    "cos and sin swapped": ([(TABLES, "sin[:, None, :], cos[:, None, :]")], "swapped places"),
    "overwritten": ([("turned = (", "first = first * cos - second * sin\n    turned = ("), (FIRST + ",", "first,")], "overwritten"),
    "second half left": ([(SECOND, "second")], "left as it was"),
    "halves swapped": ([(JOIN, "torch.cat(turned[::-1], dim=-1)")], "halves of the result are swapped"),
    "over heads": ([(TABLES, "cos, sin")], "along the heads"),
    "over batch": ([(TABLES, "cos[:, None, None], sin[:, None, None]")], "along the batch"),
    "scaled": ([("return " + JOIN, "return x.shape[-1] ** -0.5 * " + JOIN)], "sqrt(head_dim)"),
    "float32 comes back": ([(".to(x.dtype)", "")], "cast it back"),
    "computed in bfloat16": ([("x.float()", "x"), (TABLES, "cos[:, None, :].to(x.dtype), sin[:, None, :].to(x.dtype)")], "in bfloat16"),
    "cosines in bfloat16": ([(TABLES, "cos[:, None, :].to(x.dtype), sin[:, None, :].to(x.dtype)")], "in bfloat16"),
    "in place": ([("turned = (", "x *= 1.01\n    turned = (")], "in place"),
    "two values": ([("return " + JOIN + ".to(x.dtype)", "return turned")], "one tensor"),
    "something else": ([(FIRST, FIRST + " + 1")], "entries are wrong"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), TURN_MISTAKES.values(), ids=TURN_MISTAKES)
def test_each_mistake_in_turning_gets_its_own_diagnosis(changes, said):
    assert said in diagnosis(checks.check_rope_values, solved("apply_rope", *changes))


POSITIONS = {
    "nothing is turned": ([], [("turned = (", "cos, sin = cos * 0 + 1, sin * 0\n    turned = (")], "not depend on positions"),
    "cos only": ([], [(FIRST, "first * cos"), (SECOND, "second * cos")], "t - u alone"),
    "both plus": ([], [(FIRST, "first * cos + second * sin")], "t - u alone"),
    "counted from 0": ([("positions[:, None]", "torch.arange(len(positions))[:, None]")], [], "starts somewhere else"),
    "counted from the first": ([("positions[:, None]", "(positions - positions[0] % 200)[:, None]")], [], "6 ... 11"),
    "16 bits far away": ([(ANGLES, "angles = positions.bfloat16().double()[:, None] * frequencies")], [], "counts to 256"),
    "half far away": ([(ANGLES, "angles = positions.half().double()[:, None] * frequencies")], [], "ends at 65,504"),
    "the result's dtype": ([], [(".to(x.dtype)", "")], "cast it back"),
    "computed in bfloat16": ([], [("x.float()", "x"), (TABLES, "cos[:, None, :].to(x.dtype), sin[:, None, :].to(x.dtype)")], "in bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize(("angles", "apply", "said"), POSITIONS.values(), ids=POSITIONS)
def test_what_positions_must_do_is_checked_on_both_functions_together(angles, apply, said):
    students = solved("rotary_angles", *angles), solved("apply_rope", *apply)
    assert said in diagnosis(checks.check_rope_positions, *students)


SWAP, UNFLATTEN = "pairs.transpose(1, 2).reshape(weight.shape)", "(heads, -1, 2)"
ROWS = {
    "inverse": ([(UNFLATTEN, "(heads, 2, -1)")], "the way back"),
    "heads ignored": ([(UNFLATTEN, "(1, -1, 2)")], "heads are mixed up"),
    "unchanged": ([(SWAP, "weight")], "Nothing has moved"),
    "columns": ([("weight.unflatten", "weight.T.unflatten"), (SWAP, "pairs.transpose(1, 2).reshape(weight.T.shape).T")], "columns were permuted"),
    "y first": ([(SWAP, "pairs.transpose(1, 2).flip(1).reshape(weight.shape)")], "second numbers"),
    "heads inside": ([(SWAP, "pairs.permute(2, 1, 0, 3).reshape(weight.shape)")], "not the outermost"),
    "shape": ([(SWAP, "pairs.transpose(1, 2)")], "has shape"),
    "something else": ([(SWAP, "weight.flip(0)")], "Row 2i"),
    "transposed": ([(SWAP, "pairs.transpose(1, 2).reshape(weight.shape).T")], "has shape"),
    "in place": ([(SWAP, "weight.copy_(pairs.transpose(1, 2).reshape(weight.shape))")], "in place"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), ROWS.values(), ids=ROWS)
def test_each_wrong_permutation_gets_its_own_diagnosis(changes, said):
    assert said in diagnosis(checks.check_rope_conventions, solved("pairs_to_halves", *changes))


@pytest.mark.parametrize("name", NAMES)
def test_stubs_are_called_stubs(name):
    stub = function(f"def {name}(*args):\n    raise NotImplementedError", name)
    assert "not written yet" in diagnosis(CHECKS[name], stub)
