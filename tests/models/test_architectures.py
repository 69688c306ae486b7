"""Transformers' architectures with the lab's attention: equal to eager, or refused."""

import re

import pytest
import torch
import transformers

from benchmarks.architectures import ARCHITECTURES, BOUND, CASES, build, compare, runs
from labsupport.paths import project_root

PAGE = (project_root() / "docs/architectures.md").read_text(encoding="utf-8")
CELLS = {
    name: [cell.partition(" ")[0] for cell in cells.split(" | ")]
    for name, cells in re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, flags=re.M)
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_equals_eager_or_is_refused_as_its_page_says(name):
    results = [compare(name, case) for case in CASES]
    assert all(error <= BOUND for error in results if isinstance(error, float)), results
    if transformers.__version__ in PAGE:
        kinds = ["refused" if isinstance(x, str) else x is not None for x in results]
        said = [cell if cell == "refused" else cell != "–" for cell in CELLS[name]]
        assert kinds == said


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss", "llama4_text", "modernbert"])
def test_the_windows_of_the_table_hide_something(name):
    with torch.no_grad():
        wide, narrow = (runs(name, build(name, windowed=short), "plain") for short in (False, True))
    assert (wide - narrow).abs().max() > 0.01 * wide.abs().max()
