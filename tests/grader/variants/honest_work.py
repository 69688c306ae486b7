"""Honest submissions that differ in the work: right, partly right, wrong, unusual.

Expected points stand beside each: attention has 4 (values 2, mask 1, empty rows 1), memory 3
(bytes 2, length 1), softmax 4 (values 2, extremes 1, streams 1).
"""

from tests.grader.variants.course import Copy, Variants, solution

honest = Variants(attention=4, memory=3, softmax=4, tiled=7)


@honest()
def perfect(work: Copy) -> None:
    """Everything is solved."""
    work.solve()


@honest(attention=0, memory=0, softmax=0)
def untouched(work: Copy) -> None:
    """The edition as it was handed out."""


@honest(attention=0, softmax=0)
def only_memory(work: Copy) -> None:
    """One exercise solved, in the middle."""
    work.solve("memory")


@honest(attention=0)
def scale_forgotten(work: Copy) -> None:
    """A mistake that every check of the exercise sees."""
    work.solve().change("attention", (" / math.sqrt(q.shape[-1])", ""))


@honest(attention=3)
def nan_in_empty_rows(work: Copy) -> None:
    """All but the last check pass."""
    line = "weights = weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)"
    work.solve().change("attention", (line, "pass"))


@honest(attention=0)
def writes_into_its_inputs(work: Copy) -> None:
    """The values are right, but q is scaled in place."""
    work.solve().change(
        "attention",
        (
            "scores = q @ k.mT / math.sqrt(q.shape[-1])",
            "q /= q.shape[-1] ** 0.5; scores = q @ k.mT",
        ),
    )


@honest(memory=2)
def length_off_by_one(work: Copy) -> None:
    """The second of the exercise's two functions is wrong."""
    work.solve().change("memory", ("return math.isqrt(", "return 1 + math.isqrt("))


@honest(memory=2)
def second_function_deleted(work: Copy) -> None:
    """Half of an exercise is not even there."""
    work.solve().write("memory", solution("memory").split("def longest_that_fits")[0])


@honest(softmax=1)
def sum_not_rescaled(work: Copy) -> None:
    """The classic mistake of the running softmax; it does look at one block at a time."""
    work.solve().change("softmax", ("l * torch.exp(m - shift) +", "l +"))


@honest(softmax=3)
def whole_row_at_once(work: Copy) -> None:
    """The values are right, but the exercise asks for one block at a time."""
    work.solve().write(
        "softmax",
        "def running_max_and_sum(scores, block_size):\n"
        "    m = scores.amax(-1)\n"
        "    l = (scores - m.masked_fill(m == -torch.inf, 0.0)[..., None]).exp().sum(-1)\n"
        "    return m, l",
    )


@honest(attention=0)
def syntax_error_in_one_exercise(work: Copy) -> None:
    """Python cannot even read the cell; the other exercises are right."""
    work.solve().change("attention", ("def textbook_attention(", "def textbook_attention((("))


@honest(attention=0)
def misspelt_function(work: Copy) -> None:
    """The function was renamed, so the checks find no such name."""
    work.solve().change("attention", ("def textbook_attention", "def text_book_attention"))


@honest()
def another_right_way(work: Copy) -> None:
    """Right, and nothing like the lab's solution."""
    work.solve().write(
        "attention",
        "import torch.nn.functional as F\n\n\n"
        "def textbook_attention(q, k, v, mask=None):\n"
        "    d = q.shape[-1]\n"
        "    scores = torch.einsum('...id,...jd->...ij', q * d**-0.25, k * d**-0.25)\n"
        "    if mask is not None:\n"
        "        scores = scores + torch.where(mask, 0.0, -torch.inf).to(scores.dtype)\n"
        "    weights = F.softmax(scores, dim=-1).nan_to_num(0.0)\n"
        "    return torch.matmul(weights, v), weights",
    )


@honest()
def lambdas(work: Copy) -> None:
    """Functions that were assigned, not defined."""
    work.solve().write(
        "memory",
        "score_bytes = lambda b, h, n, w: 2 * b * h * n * n * w\n"
        "longest_that_fits = lambda memory, b, h, w: math.isqrt(memory // (2 * b * h * w))",
    )


@honest()
def a_callable_object(work: Copy) -> None:
    """An object with __call__ is as good as a function."""
    body = solution("attention").replace("def textbook_attention(q", "    def __call__(self, q")
    lines = body.split("\n")
    body = "\n".join([lines[0], *("    " + line for line in lines[1:])])
    work.solve().write(
        "attention", f"class Attention:\n{body}\n\n\ntextbook_attention = Attention()"
    )


@honest()
def typed_and_documented(work: Copy) -> None:
    """Type hints, a decorator, accents and Greek letters."""
    text = solution("softmax").replace("m_new", "μ_neu").replace("shift", "décalage")
    text = text.replace("(scores, block_size):", "(scores: 'Tensor', block_size: int) -> tuple:")
    work.solve().write("softmax", f"import functools\n\n\n@torch.no_grad()\n{text}")


@honest()
def prints_and_warns(work: Copy) -> None:
    """Noise from the student's debugging."""
    noise = (
        "    import warnings, sys, logging\n"
        "    print('shape', q.shape)\n"
        "    print('on stderr', file=sys.stderr)\n"
        "    logging.error('look here')\n"
        "    warnings.warn('slow')\n"
        "    scores = q"
    )
    work.solve().change("attention", ("    scores = q", noise))


@honest()
def keeps_state_between_calls(work: Copy) -> None:
    """A global counter and a cache, both harmless."""
    work.solve().write(
        "memory",
        "from functools import cache\n\ncalls = 0\n\n\n"
        "@cache\ndef _product(*numbers):\n    return math.prod(numbers)\n\n\n"
        "def score_bytes(batch, heads, seqlen, bytes_per_element):\n"
        "    global calls\n    calls += 1\n"
        "    return _product(2, batch, heads, seqlen, seqlen, bytes_per_element)\n\n\n"
        "def longest_that_fits(memory, batch, heads, bytes_per_element):\n"
        "    return math.isqrt(memory // _product(2, batch, heads, bytes_per_element))",
    )


@honest(notebook="02-Tiled")
def tiled_perfect(work: Copy) -> None:
    """The other notebook, solved."""
    work.solve()


@honest(notebook="02-Tiled", tiled=6)
def tiled_beside_the_whole_matrix(work: Copy) -> None:
    """The values are right, but all N x N scores exist too: the memory check must see it."""
    line = "    out = torch.zeros_like(q)"
    work.solve().change("tiled", (line, f"    all_scores = q @ k.mT\n{line}"))


@honest(notebook="02-Tiled")
def compared_with_pytorchs_own(work: Copy) -> None:
    """A check against PyTorch's attention, and a plot, left at the end of the solution cell."""
    trial = (
        "q = torch.randn(1, 8, 4)\n"
        "theirs = torch.nn.functional.scaled_dot_product_attention(q, q, q)\n"
        "assert torch.allclose(my_flash_forward(q, q, q, False, 4, 4)[0], theirs, atol=1e-5)\n"
        "import matplotlib.pyplot as plt\n\nplt.plot(theirs[0])\nplt.savefig('mine.png')"
    )
    work.solve().write("tiled", f"{solution('tiled')}\n\n\n{trial}")


@honest()
def row_by_row_in_python(work: Copy) -> None:
    """The textbook, slow, in float64, and compiled; both values in a list."""
    work.solve().write(
        "attention",
        "@torch.compile\n"
        "def textbook_attention(q, k, v, mask=None):\n"
        "    rows = []\n"
        "    for i in range(q.shape[-2]):\n"
        "        row = (k.double() * q[..., i : i + 1, :]).sum(-1) / math.sqrt(q.shape[-1])\n"
        "        if mask is not None:\n"
        "            seen = mask[..., i % mask.shape[-2], :].expand_as(row)\n"
        "            row = torch.where(seen, row, -torch.inf)\n"
        "        rows.append(row.softmax(-1).nan_to_num(0.0))\n"
        "    weights = torch.stack(rows, -2).to(q.dtype)\n"
        "    return [weights @ v, weights]",
    )
