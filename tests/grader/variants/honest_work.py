"""Honest submissions that differ in the work, where honest.txt cannot say it.

The leak has 2 points (rows 1, output 1); attention 5 and softmax 6, all or nothing.
"""

from tests.grader.variants.course import Copy, Variants, solution

honest = Variants(attention=5, leak=2, softmax=6, tiled=9)


@honest()
def perfect(work: Copy) -> None:
    """Everything is solved."""
    work.solve()


@honest(attention=0, leak=0, softmax=0)
def untouched(work: Copy) -> None:
    """The edition as it was handed out."""


@honest(attention=0, softmax=0)
def only_the_leak(work: Copy) -> None:
    """One exercise solved, in the middle."""
    work.solve("leak")


@honest(notebook="02-Tiled")
def tiled_perfect(work: Copy) -> None:
    """The other notebook, solved."""
    work.solve()


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
