"""Hostile submissions that play with the cells: checks, markers, metadata, sources, the library.

The first exercise is what is played with. The others are solved where nothing else is said.
"""

import json

from tests.grader.variants.course import EXERCISES, Copy, Variants, solution
from tests.grader.variants.hostile_breaking import WRONG
from tests.grader.variants.hostile_lies import STUB

hostile = Variants(memory=3, softmax=4)


@hostile()
def skip_and_raises_markers(work: Copy) -> None:
    """nbval's comments and tags, which make a failing cell count as passed."""
    marks = "# NBVAL_SKIP\n# NBVAL_RAISES_EXCEPTION\n# NBVAL_IGNORE_OUTPUT\n"
    work.solve().write("attention", marks + STUB)
    for cell in [work.cell("attention"), *work.checks("attention")]:
        cell.metadata["tags"] = ["nbval-skip", "raises-exception", "nbval-raises-exception"]
        cell.source = cell.source if cell.source.startswith("#") else marks + cell.source


@hostile()
def check_cells_edited(work: Copy) -> None:
    """The checks of the copy say yes; they also claim 100 points each."""
    work.solve().write("attention", WRONG)
    for cell in work.checks("attention"):
        cell.source = "print('[ok] everything')"
        cell.metadata.nbgrader.update(points=100, locked=False)


@hostile()
def check_cells_deleted(work: Copy) -> None:
    """No check, no failure?"""
    work.solve().write("attention", WRONG)
    for cell in work.checks("attention"):
        work.notebook.cells.remove(cell)


@hostile()
def check_cells_as_markdown(work: Copy) -> None:
    """The checks are text now."""
    work.solve().write("attention", WRONG)
    for cell in work.checks("attention"):
        cell.cell_type = "markdown"
        cell.pop("outputs"), cell.pop("execution_count")


@hostile()
def solution_cell_as_markdown(work: Copy) -> None:
    """A right solution, but as text: Jupyter would not run it."""
    cell = work.solve().cell("attention")
    cell.cell_type = "markdown"
    cell.pop("outputs"), cell.pop("execution_count")


@hostile()
def check_cells_that_grade_themselves(work: Copy) -> None:
    """Check cells are declared solutions, so that their text is the student's."""
    work.solve().write("attention", WRONG)
    for cell in work.checks("attention"):
        cell.metadata.nbgrader.update(solution=True, grade=True, task=False)
        cell.source = "pass"


@hostile()
def repeated_check_cells(work: Copy) -> None:
    """A check that passes, a hundred times: of a solved exercise, under another's name."""
    work.solve().write("attention", WRONG)
    passing = work.cell("memory", "bytes")
    for number in range(100):
        work.add(passing.source)
        identifier = EXERCISES["attention"] + ("-values" if number % 2 else "-mask")
        made = {**passing.metadata.nbgrader, "grade_id": identifier, "points": 50}
        work.notebook.cells[-1].metadata["nbgrader"] = made


@hostile()
def repeated_solution_cells(work: Copy) -> None:
    """Three solution cells with the same grade_id, all wrong."""
    work.solve().write("attention", WRONG)
    for _ in range(2):
        work.add(WRONG)
        work.notebook.cells[-1].metadata["nbgrader"] = dict(
            work.cell("attention").metadata.nbgrader
        )


@hostile()
def strange_metadata(work: Copy) -> None:
    """Points as text, schemas that do not exist, grade_ids that are paths or no text at all."""
    work.solve().write("attention", WRONG)
    for number, cell in enumerate(work.checks("attention")):
        cell.metadata.nbgrader.update(points="1e9", schema_version=-1, cell_type="code")
        cell.metadata.nbgrader["grade_id"] = ["../../etc/passwd", ["x"], {"a": 1}][number]
    work.notebook.metadata["nbgrader"] = {"points": 1000, "status": "graded"}
    work.notebook.metadata["kernelspec"] = {"name": "../../evil", "argv": ["touch", "/tmp/evil"]}


@hostile()
def unreadable_source(work: Copy) -> bytes:
    """Half of a surrogate pair, NUL bytes and control characters in a source."""
    work.solve().write("attention", f"# \ud800 \x00 \x0c \x1b[2J \u2028\n{WRONG}")
    return json.dumps(work.notebook).encode()


def _source(name: str, source: str, why: str) -> None:
    def build(work: Copy) -> None:
        work.solve().write("attention", source)

    build.__name__, build.__doc__ = name, why
    hostile()(build)


_source("deep_parentheses", "x = " + "(" * 50_000 + ")" * 50_000, "Brackets that exhaust a parser.")
_source("deep_operators", "x = " + "-" * 150_000 + "1", "A tree as deep as the source is long.")
_source("huge_power", f"x = 9 ** 9 ** 9\n{WRONG}", "A number with 369 million digits.")
_source("unfinished_string", '"""' + "never closed\n" * 1000, "The rest of the notebook, quoted?")
_source(
    "coroutine_function", solution("attention").replace("def ", "async def "), "Awaited by nobody."
)


@hostile(notebook="02-Tiled")
def calls_sdpa(work: Copy) -> None:
    """The library's FlashAttention, called instead of written: right values, no points."""
    work.solve().write(
        "tiled", _TILED.format(call="torch.nn.functional.scaled_dot_product_attention")
    )


@hostile(notebook="02-Tiled")
def calls_sdpa_by_another_name(work: Copy) -> None:
    """The same through an alias, in letters that Python reads as the same name."""
    work.solve().write("tiled", _TILED.format(call="_f.ｓcaled_dot_product_attention"))
    work.add("import torch.nn.functional as _f", at=2)


@hostile(notebook="02-Tiled")
def calls_the_labs_own(work: Copy) -> None:
    """The package's reference implementation."""
    work.write(
        "tiled",
        "from labsupport.attention.flash_torch import flash_attention_forward as _theirs\n\n\n"
        "def my_flash_forward(q, k, v, is_causal, block_q, block_k):\n"
        "    return _theirs(q, k, v, is_causal, block_q=block_q, block_k=block_k)",
    )


@hostile(notebook="02-Tiled")
def calls_the_labs_own_by_a_detour(work: Copy) -> None:
    """The same, by a name put together at run time."""
    work.write(
        "tiled",
        "import importlib\n\n\n"
        "def my_flash_forward(q, k, v, is_causal, block_q, block_k):\n"
        "    name = '.'.join(['labsupport', 'attention', 'flash_torch'])\n"
        "    module = importlib.import_module(name)\n"
        "    function = getattr(module, 'flash_' + 'attention_forward')\n"
        "    return function(q, k, v, is_causal, block_q=block_q, block_k=block_k)",
    )


@hostile(notebook="02-Tiled")
def calls_transformers_own(work: Copy) -> None:
    """The attention of another library's model, with a stand-in for its module."""
    call = (
        "(lambda q, k, v, attn_mask: eager_attention_forward(_module, q, k, v, "
        "torch.zeros(mask.shape).masked_fill(~mask, -torch.inf), scaling=q.shape[-1] ** -0.5"
        ")[0].transpose(1, 2))"
    )
    work.solve().write("tiled", _TILED.format(call=call))
    name = "from transformers.models.llama.modeling_llama import eager_attention_forward"
    module = "class _module:\n    num_key_value_groups, training = 1, False"
    work.add(f"{name}\n\n\n{module}", at=2)


# What the rules cannot tell for sure is only flagged, and a person takes the points.
@hostile(notebook="02-Tiled", tiled=6)
def calls_sdpa_out_of_a_table(work: Copy) -> None:
    """The library's function, taken from its module's table of names."""
    call = 'vars(torch.nn.functional)["scaled_dot_product_attention"]'
    work.solve().write("tiled", _TILED.format(call=call))


_TILED = """
def my_flash_forward(q, k, v, is_causal, block_q, block_k):
    n, m = q.shape[-2], k.shape[-2]
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    mask = torch.ones(n, m, dtype=torch.bool)
    if is_causal:
        mask = mask.tril(m - n)
    lse = scores.masked_fill(~mask, -torch.inf).logsumexp(-1)
    return {call}(q, k, v, attn_mask=mask), lse
"""


@hostile(attention=4, softmax=3)
def whole_rows_in_numpy(work: Copy) -> None:
    """Row after row, each as a whole, where nothing in the process watches operators."""
    work.solve().write(
        "softmax",
        "import numpy as np\n\n\n"
        "def running_max_and_sum(scores, block_size):\n"
        "    rows = scores.reshape(-1, scores.shape[-1]).numpy()\n"
        "    m = [row.max() for row in rows]\n"
        "    l = [np.exp(r - (0 if np.isinf(a) else a)).sum() for r, a in zip(rows, m)]\n"
        "    return tuple(torch.tensor(np.array(x)).reshape(scores.shape[:-1]) for x in (m, l))",
    )
