"""Claims stand beside their targets, met or missed."""

from functools import partial

import torch

from benchmarks import claims
from benchmarks.__main__ import parser_of
from benchmarks.runner import Case, run


def test_each_ratio_is_compared_with_its_target():
    options = parser_of("claims").parse_args(["--seqlen", "64", "--max-seconds", "0.02"])
    cpu, direction = torch.device("cpu"), "forward+backward"
    case = Case({"direction": direction}, partial(claims._direction, direction, options, cpu))
    table = run([case], cpu, progress=False)
    targets = dict(zip(table.what, table.target, strict=True))
    assert targets["time textbook / flash_torch"] == "at least 1.5"
    assert targets["time flash_torch / sdpa_flash"] == "at most 3"
    assert targets["memory textbook / flash_torch"] == "at least 20"
    spared = table.set_index("what").loc["memory textbook / flash_torch"]
    assert spared.met == (spared["median"] >= 20)
    lines = claims.show(table, options).splitlines()[2:]
    assert ["extra memory" in line for line in lines] == [True] * 3 + [False] * 3
    assert ["met" in line or "missed" in line for line in lines] == [False] * 3 + [True] * 3
