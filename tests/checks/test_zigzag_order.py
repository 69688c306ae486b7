import pytest
import torch

from labsupport import checks
from labsupport.checks import zigzag_order as lab
from labsupport.checks.verdict import Mistake
from labsupport.distributed.ring.zigzag import chunks_of, positions_of, unshard_sequence
from tests.checks.solutions import diagnosis, each, function, solution_source

CHECKS = {
    "zigzag_chunks": checks.check_zigzag_chunks,
    "zigzag_positions": checks.check_zigzag_positions,
    "unzigzag": checks.check_unzigzag,
}


@pytest.mark.parametrize("seed", [0, 5, 8])
def test_the_solutions_pass(seed, capsys):
    for name, check in CHECKS.items():
        check(function(solution_source("03", "ex-3-5-zigzag"), name), seed=seed)
    assert capsys.readouterr().out.count("[ok]") == 3


def test_the_labs_own_functions_pass():
    CHECKS["zigzag_chunks"](lambda rank, world: chunks_of(rank, world, zigzag=True))
    CHECKS["zigzag_positions"](
        lambda seqlen, rank, world: positions_of(seqlen // world, rank, world, zigzag=True)
    )
    CHECKS["unzigzag"](lambda shards: unshard_sequence(shards, zigzag=True))


def test_other_right_ways_pass():
    """A list of two; chunks as rows; the inverse by an index that is sorted, or filled in."""
    shared = """
def zigzag_chunks(rank, world):
    return [list(range(2 * world))[rank], list(range(2 * world))[-1 - rank]]

def zigzag_positions(seqlen, rank, world):
    rows = torch.arange(seqlen).reshape(2 * world, -1)
    return rows[zigzag_chunks(rank, world)].flatten()

def order(shards):
    seqlen = sum(shard.shape[1] for shard in shards)
    return torch.cat([zigzag_positions(seqlen, r, len(shards)) for r in range(len(shards))])
"""
    by_sorting = "return torch.cat(shards, dim=1)[:, order(shards).argsort()]"
    filled_in = (
        "joined = torch.cat(shards, dim=1)\n"
        "    whole = torch.empty_like(joined)\n"
        "    whole[:, order(shards)] = joined\n"
        "    return whole"
    )
    for body in (by_sorting, filled_in):
        text = f"{shared}\ndef unzigzag(shards):\n    {body}\n"
        for name, check in CHECKS.items():
            check(function(text, name))


def test_integers_of_pytorch_are_whole_numbers_too():
    CHECKS["zigzag_chunks"](lambda rank, world: torch.tensor([rank, 2 * world - 1 - rank]))
    CHECKS["zigzag_chunks"](lambda rank, world: torch.tensor([rank, 2 * world - 1 - rank]).unbind())


OTHER_CHUNKS = (
    Mistake(("2 * world - 1 - rank", "(rank + 3) % (2 * world)"), "as far from the end"),
    Mistake((", 2 * world - 1 - rank", ""), "two numbers"),
    Mistake(("2 * world - 1 - rank", "rank, rank"), "two numbers"),
    Mistake(("2 * world - 1 - rank", "(4 * world - 2 - 2 * rank) / 2"), "use //"),
    Mistake(("return rank", "return rank + 0.9"), "is an int"),
    Mistake(("rank, 2 * world - 1 - rank", "torch.tensor([rank, 2 * world - 1.0 - rank])"), "//"),
    Mistake(("rank, 2 * world - 1 - rank", '"a", "b"'), "is an int"),
    Mistake(("return rank", "return None"), "is an int"),
)
OTHER_POSITIONS = (
    Mistake(("in chunks])", "in chunks]).float()"), "int64"),
    Mistake(("in chunks])", "in chunks]).tolist()"), "one tensor"),
    Mistake(("in chunks])", "in chunks]).roll(1)"), "Number 0 is"),
    Mistake(("in chunks])", "in chunks])[:-1]"), "a rank has"),
)
OTHER_INVERSES = (
    Mistake(("*reversed(late)", "*(part.flip(1) for part in reversed(late))"), "its chunks only"),
    Mistake(("], dim=1)", "], dim=0)"), "has shape"),
    Mistake(("], dim=1)", "], dim=1).roll(1, 1)"), "wrong place is at 0"),
    Mistake(("], dim=1)", "], dim=1).float()"), "the shards torch.int64"),
    Mistake(("    return", "    shards[0].mul_(2)\n    return"), "in place"),
    Mistake(
        ("torch.cat([*early, *reversed(late)], dim=1)", "[*early, *reversed(late)]"), "one tensor"
    ),
)


@each(
    (checks.check_zigzag_chunks, lab.zigzag_chunks, lab.CHUNK_MISTAKES + OTHER_CHUNKS),
    (checks.check_zigzag_positions, lab.zigzag_positions, lab.POSITION_MISTAKES + OTHER_POSITIONS),
    (checks.check_unzigzag, lab.unzigzag, lab.INVERSE_MISTAKES + OTHER_INVERSES),
)
def test_each_mistake_gets_its_own_diagnosis(check, student, said):
    assert said in diagnosis(check, student)


@pytest.mark.parametrize("name", CHECKS)
def test_stubs_are_called_stubs(name):
    stub = function(f"def {name}(*args):\n    raise NotImplementedError", name)
    assert "not written yet" in diagnosis(CHECKS[name], stub)
