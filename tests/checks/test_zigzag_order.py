import pytest
import torch

from labsupport import checks
from labsupport.distributed.ring.zigzag import chunks_of, positions_of, unshard_sequence
from tests.checks.solutions import broken, function, solution_source

CHECKS = {
    "zigzag_chunks": checks.check_zigzag_chunks,
    "zigzag_positions": checks.check_zigzag_positions,
    "unzigzag": checks.check_unzigzag,
}


def source():
    return solution_source("03", "ex-3-5-zigzag")


def solved(name, *changes):
    return broken(source(), name, *changes)


def diagnosis(name, student):
    with pytest.raises(checks.CheckFailed) as caught:
        CHECKS[name](student)
    return str(caught.value)


@pytest.mark.parametrize("seed", [0, 5, 8])
def test_the_solutions_pass(seed, capsys):
    for name, check in CHECKS.items():
        check(solved(name), seed=seed)
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


PAIR = "return rank, 2 * world - 1 - rank"
CHUNKS = {
    "r and r + W": ([(PAIR, "return rank, rank + world")], "Count the second one from the end"),
    "contiguous": ([(PAIR, "return 2 * rank, 2 * rank + 1")], "one contiguous shard"),
    "one too far": ([(PAIR, "return rank, 2 * world - rank")], "one too far"),
    "within the first half": ([(PAIR, "return rank, world - 1 - rank")], "end of the first half"),
    "late first": ([(PAIR, "return 2 * world - 1 - rank, rank")], "the early one comes first"),
    "from the middle": ([(PAIR, "return world - 1 - rank, world + rank")], "other way round"),
    "from 1": ([(PAIR, "return rank + 1, 2 * world - rank")], "count from 0"),
    "something else": ([(PAIR, "return rank, (rank + 3) % (2 * world)")], "as far from the end"),
    "one chunk": ([(PAIR, "return rank")], "two numbers"),
    "three chunks": ([(PAIR, "return rank, rank, rank")], "two numbers"),
    "whole numbers as floats": ([(PAIR, "return rank, (4 * world - 2 - 2 * rank) / 2")], "take //"),
    "not whole": ([(PAIR, "return rank + 0.9, 2 * world - 1 - rank")], "is an int"),
    "a tensor of floats": ([(PAIR, "return torch.tensor([rank, 2 * world - 1.0 - rank])")], "//"),
    "letters": ([(PAIR, 'return "a", "b"')], "is an int"),
    "None": ([(PAIR, "return None, 1")], "is an int"),
}


@pytest.mark.parametrize(("changes", "said"), CHUNKS.values(), ids=CHUNKS)
def test_each_wrong_choice_of_chunks_gets_its_own_diagnosis(changes, said):
    assert said in diagnosis("zigzag_chunks", solved("zigzag_chunks", *changes))


ALL, SIZE = (
    "torch.cat([torch.arange(c * size, (c + 1) * size) for c in chunks])",
    "seqlen // (2 * world)",
)
POSITIONS = {
    "local": ([(ALL, "torch.arange(seqlen // world)")], "within the rank's own shard"),
    "contiguous": ([(ALL, "torch.arange(rank * 2 * size, (rank + 1) * 2 * size)")], "contiguous shards"),
    "stripes": ([(ALL, "torch.arange(rank, seqlen, world)")], "stripes"),
    "r and r + W": ([(PAIR, "return rank, rank + world")], "rank + world"),
    "chunk size": ([(SIZE, "seqlen // world")], "twice as long"),
    "late backwards": ([(ALL, "torch.cat([torch.arange(chunks[0] * size, (chunks[0] + 1) * size), torch.arange(chunks[1] * size, (chunks[1] + 1) * size).flip(0)])")], "falling order"),
    "late first": ([("for c in chunks", "for c in chunks[::-1]")], "late chunk comes first"),
    "early only": ([("for c in chunks", "for c in chunks[:1]")], "second chunk is missing"),
    "from 1": ([(ALL, ALL + " + 1")], "start at 0"),
    "numbers of chunks": ([(ALL, "torch.tensor(chunks).repeat_interleave(size)")], "numbers of the chunks"),
    "floats": ([(ALL, ALL + ".float()")], "int64"),
    "a list": ([(ALL, ALL + ".tolist()")], "one tensor"),
    "something else": ([(ALL, ALL + ".roll(1)")], "Number 0 is"),
    "too few": ([(ALL, ALL + "[:-1]")], "a rank holds"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), POSITIONS.values(), ids=POSITIONS)
def test_each_mistake_in_the_positions_gets_its_own_diagnosis(changes, said):
    assert said in diagnosis("zigzag_positions", solved("zigzag_positions", *changes))


JOIN = "torch.cat([*early, *reversed(late)], dim=1)"
ORDER = (
    "order = torch.cat([zigzag_positions(len(shards) * shards[0].shape[1], r, len(shards)) "
    "for r in range(len(shards))])"
)
INVERSE = {
    "concatenated": ([(JOIN, "torch.cat(shards, dim=1)")], "as if they were contiguous"),
    "the same permutation": ([("return " + JOIN, ORDER + "\n    return torch.cat(shards, dim=1)[:, order]")], "once more"),
    "late ones not reversed": ([("*reversed(late)", "*late")], "rank 0 holds the LAST chunk"),
    "late tokens reversed": ([(JOIN, "torch.cat([*early, torch.cat(late, 1).flip(1)], dim=1)")], "Reverse the order of the chunks"),
    "late half first": ([("[*early, *reversed(late)]", "[*reversed(late), *early]")], "late half comes first"),
    "late chunks backwards": ([("*reversed(late)", "*(part.flip(1) for part in reversed(late))")], "Reverse the order of the chunks"),
    "stripes": ([(JOIN, "torch.stack(shards, 2).flatten(1, 2)")], "undoes stripes"),
    "backwards": ([("[*early, *reversed(late)]", "[*late, *reversed(early)]")], "reversed order of its chunks"),
    "along the batch": ([(JOIN, "torch.cat(shards, dim=0)")], "along the batch"),
    "another dimension": ([(JOIN, "torch.cat([*early, *reversed(late)], dim=0)")], "has shape"),
    "something else": ([(JOIN, JOIN + ".roll(1, 1)")], "wrong place stands at 0"),
    "dtype": ([(JOIN, JOIN + ".float()")], "the shards torch.int64"),
    "in place": ([("return " + JOIN, "shards[0].mul_(2)\n    return " + JOIN)], "in place"),
    "a list": ([(JOIN, "[*early, *reversed(late)]")], "one tensor"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), INVERSE.values(), ids=INVERSE)
def test_each_wrong_way_back_gets_its_own_diagnosis(changes, said):
    assert said in diagnosis("unzigzag", solved("unzigzag", *changes))


@pytest.mark.parametrize("name", CHECKS)
def test_stubs_are_called_stubs(name):
    stub = function(f"def {name}(*args):\n    raise NotImplementedError", name)
    assert "not written yet" in diagnosis(name, stub)
