import pytest
import torch

from labsupport import checks
from labsupport.attention.rotary import apply_rotary_emb, permute_rotary_rows
from labsupport.attention.rotary import rotary_angles as labs_angles
from labsupport.checks import rotary
from labsupport.checks.verdict import Mistake, mutant
from tests.checks.solutions import diagnosis, each, function, solution_source

NAMES = ("rotary_angles", "apply_rope", "pairs_to_halves")
CHECKS = dict(
    zip(
        NAMES,
        (checks.check_rope_angles, checks.check_rope_values, checks.check_rope_conventions),
        strict=True,
    )
)


def solved(name):
    return function(solution_source("03", "ex-3-1-rotary"), name)


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


def far_away(angles):
    checks.check_rope_positions(angles, rotary.apply_rope)


COS_SIN = "return angles.cos().float(), angles.sin().float()"
OTHER_ANGLES = (
    Mistake(("10_000.0", "500_000.0"), "base not given"),
    Mistake(
        ("    return", "    angles = torch.cat((angles, angles), -1)\n    return"),
        "each has one angle",
    ),
    Mistake((COS_SIN, "return angles.cos(), angles.sin()"), "float32"),
    Mistake((".float()", ".bfloat16()"), "cannot count"),
    Mistake((COS_SIN, "return angles.cos().float()"), "2 values"),
)
FIRST, TABLES = "first * cos - second * sin", "cos[:, None, :], sin[:, None, :]"
IN_16_BITS = (TABLES, "cos[:, None, :].to(x.dtype), sin[:, None, :].to(x.dtype)")
COMPUTED_IN_16_BITS = ("x.to(cos.dtype)", "x", *IN_16_BITS)
OTHER_TURNS = (
    Mistake((".to(x.dtype)", ""), "cast it back"),
    Mistake(COMPUTED_IN_16_BITS, "in bfloat16"),
    Mistake(IN_16_BITS, "in bfloat16"),
    Mistake(("    turned =", "    x *= 1.01\n    turned ="), "in place"),
    Mistake(("return torch.cat(turned, dim=-1).to(x.dtype)", "return turned"), "one tensor"),
    Mistake((FIRST, FIRST + " + 1"), "entries are wrong"),
)
SWAP = "pairs.transpose(1, 2).reshape(weight.shape)"
OTHER_ROWS = (
    Mistake((SWAP, "pairs.transpose(1, 2)"), "has shape"),
    Mistake((SWAP, "weight.flip(0)"), "Row 2i"),
    Mistake((SWAP, SWAP + ".T"), "has shape"),
    Mistake((SWAP, f"weight.copy_({SWAP})"), "in place"),
)


@each(
    (
        (checks.check_rope_angles, far_away),
        rotary.rotary_angles,
        rotary.ANGLE_MISTAKES + OTHER_ANGLES,
    ),
    (checks.check_rope_values, rotary.apply_rope, rotary.TURN_MISTAKES + OTHER_TURNS),
    (checks.check_rope_conventions, rotary.pairs_to_halves, rotary.ROW_MISTAKES + OTHER_ROWS),
)
def test_each_mistake_gets_its_own_diagnosis(check, student, said):
    assert said in diagnosis(check, student)


COUNTED = ("positions[:, None]", "torch.arange(len(positions))[:, None]")
FROM_THE_FIRST = ("positions[:, None]", "(positions - positions[0] % 200)[:, None]")
POSITIONS = {
    "nothing is turned": ((), ("    turned =", "    cos, sin = cos * 0 + 1, sin * 0\n    turned ="), "not depend on positions"),
    "cos only": ((), (" - second * sin", "", " + first * sin", ""), "t - u alone"),
    "both plus": ((), ("cos - second", "cos + second"), "t - u alone"),
    "counted from 0": (COUNTED, (), "starts somewhere else"),
    "counted from the first": (FROM_THE_FIRST, (), "6 ... 11"),
    "the result's dtype": ((), (".to(x.dtype)", ""), "cast it back"),
    "computed in bfloat16": ((), COMPUTED_IN_16_BITS, "in bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize(("angles", "apply", "said"), POSITIONS.values(), ids=POSITIONS)
def test_what_positions_must_do_is_checked_on_both_functions_together(angles, apply, said):
    students = mutant(rotary.rotary_angles, angles), mutant(rotary.apply_rope, apply)
    assert said in diagnosis(checks.check_rope_positions, *students)


@pytest.mark.parametrize("name", NAMES)
def test_stubs_are_called_stubs(name):
    stub = function(f"def {name}(*args):\n    raise NotImplementedError", name)
    assert "not written yet" in diagnosis(CHECKS[name], stub)
