"""Hostile submissions that want points for answers that are not theirs, or not right.

The first exercise lies. The others are solved where nothing else is said.
"""

from tests.grader.variants.course import Copy, Variants
from tests.grader.variants.hostile_breaking import in_the_call, in_the_cell

hostile = Variants(memory=3, softmax=4)

STUB = "def textbook_attention(q, k, v, mask=None):\n    raise NotImplementedError\n"


@hostile()
def equal_to_everything(work: Copy) -> None:
    """An object that every comparison finds right."""
    source = (
        "class Right:\n"
        "    def __eq__(self, other):\n        return True\n\n"
        "    def __bool__(self):\n        return True\n\n"
        "    def __getattr__(self, name):\n        return self\n\n"
        "    def __call__(self, *args, **options):\n        return self\n\n"
        "    __lt__ = __le__ = __gt__ = __ge__ = __ne__ = __eq__\n"
        "    __hash__ = object.__hash__\n    __sub__ = __add__ = __mul__ = __call__\n"
    )
    right = "def textbook_attention(q, k, v, mask=None):\n    return Right(), Right()\n"
    in_the_cell(work, source, right)


@hostile(memory=0, attention=4)
def number_equal_to_everything(work: Copy) -> None:
    """An int whose comparisons always agree."""
    names = ("score_bytes", "longest_that_fits")
    functions = "\n".join(f"{n} = lambda *a: Right(1)" for n in names)
    operators = "\n".join(
        f"    __{n}__ = lambda self, *o: True" for n in ("eq", "le", "ge", "lt", "gt", "bool")
    )
    numbers = "\n".join(f"    __{n}__ = lambda self, *o: self" for n in ("sub", "rsub", "abs"))
    source = (
        f"class Right(int):\n{operators}\n{numbers}\n    __hash__ = int.__hash__\n\n\n{functions}"
    )
    work.solve().write("memory", source)


@hostile(memory=0, attention=4)
def the_name_of_a_type(work: Copy) -> None:
    """A bool, a float that is not a number, and a string that looks like a number."""
    source = "score_bytes = lambda *a: float('nan')\nlongest_that_fits = lambda *a: True"
    work.solve().write("memory", source)


@hostile()
def lying_tensor_subclass(work: Copy) -> None:
    """A tensor subclass that answers every function of PyTorch with what suits it."""
    source = (
        "class Right(torch.Tensor):\n    @classmethod\n"
        "    def __torch_function__(cls, function, types, args=(), kwargs=None):\n"
        "        if function.__name__ in ('equal', 'allclose', 'isnan', 'any', 'all'):\n"
        "            return torch.tensor(function.__name__ in ('equal', 'allclose', 'all'))\n"
        "        with torch._C.DisableTorchFunctionSubclass():\n"
        "            return function(*args, **(kwargs or {}))\n\n"
        "    def __eq__(self, other):\n        return True\n\n"
        "    def detach(self):\n        return self\n\n"
        "    def double(self):\n        return self\n"
    )
    right = (
        "def textbook_attention(q, k, v, mask=None):\n"
        "    out, w = torch.zeros_like(q), torch.zeros(*q.shape[:-1], k.shape[-2])\n"
        "    return out.as_subclass(Right), w.as_subclass(Right)\n"
    )
    in_the_cell(work, source, right)


def _returns(name: str, value: str, why: str) -> None:
    def build(work: Copy) -> None:
        in_the_call(work, f"return {value}")

    build.__name__, build.__doc__ = name, why
    hostile()(build)


for _name, _value, _why in (
    ("returns_nan", "q * torch.nan, (q @ k.mT) * torch.nan", "NaN, which no comparison refuses."),
    ("returns_infinity", "q + torch.inf, q @ k.mT + torch.inf", "Infinity everywhere."),
    ("returns_empty_tensors", "q[:0], q[:0]", "Empty tensors, over which everything is true."),
    ("returns_the_wrong_shape", "q[..., :1, :1], q[..., :1, :1]", "Shapes that broadcast."),
    ("returns_meta_tensors", "q.to('meta'), (q @ k.mT).to('meta')", "Tensors without values."),
    ("returns_sparse_tensors", "q.to_sparse(), (q @ k.mT).to_sparse()", "Another layout."),
    ("returns_complex_tensors", "q + 1j, q @ k.mT + 1j", "Numbers that have no order."),
    (
        "returns_huge_views",
        "torch.zeros(1).expand(2**40), torch.zeros(1).expand(2**40)",
        "Tensors of 4 TB that take 4 bytes.",
    ),
    ("returns_huge_tensors", "torch.ones(2**28), torch.ones(2**28)", "Two tensors of 1 GB."),
    ("returns_strings", "'the right output', 'the right weights'", "Text."),
    ("returns_itself", "textbook_attention, textbook_attention", "Functions instead of values."),
    ("returns_the_inputs", "q, torch.eye(q.shape[-2], k.shape[-2])", "Looks right, is not."),
    ("returns_a_generator", "(x for x in iter(int, 1))", "A sequence that never ends."),
    (
        "returns_deep_lists",
        "__import__('functools').reduce(lambda a, _: [a], range(10**5), 0)",
        "A list in a list, a hundred thousand deep.",
    ),
    ("returns_a_circle", "(lambda x: x.append(x) or x)([])", "A list that holds itself."),
    ("returns_a_million_values", "[q] * 10**6", "A million tensors."),
):
    _returns(_name, _value, _why)


@hostile()
def returns_a_pickle_that_bites(work: Copy) -> None:
    """An object that would run a command where it is unpickled."""
    source = (
        "class Bite:\n    def __reduce__(self):\n"
        "        import os\n        return os.system, ('touch \"$LABSUPPORT_TEST_CANARY\"',)\n\n"
        "    def __repr__(self):\n        return '__import__(\"os\").abort()'\n"
    )
    bite = "def textbook_attention(q, k, v, mask=None):\n    return Bite(), Bite()\n"
    in_the_cell(work, source, bite)


@hostile(memory=0, attention=4)
def hard_coded_answers(work: Copy) -> None:
    """The visible check's inputs are known: a table of its answers."""
    source = (
        "import random\n\ndraw = random.Random(0)\n"
        "cases = [(1, 1, 1024, 4), (2, 12, 2048, 2), (1, 32, 65_536, 2)]\n"
        "cases += [(draw.randint(2, 9), draw.randint(2, 40), draw.randint(100, 9999), 4)"
        " for _ in range(3)]\n"
        "ANSWERS = {c: 2 * c[0] * c[1] * c[2] ** 2 * c[3] for c in cases}\n"
        "score_bytes = lambda *case: ANSWERS.get(case, 1)\n"
        "longest_that_fits = lambda *case: 4096"
    )
    work.solve().write("memory", source)


@hostile()
def right_in_one_process_of_two(work: Copy) -> None:
    """Hidden seeds of the lab's own notebook, answered from a table."""
    source = (
        "def _inputs(seed):\n    g = torch.Generator().manual_seed(seed)\n"
        "    return [torch.randn(2, 3, n, 16, generator=g) for n in (5, 7, 7)]\n\n\n"
        "TABLE = {}\nfor seed in (0, 11):\n    q, k, v = _inputs(seed)\n"
        "    w = (q @ k.mT / 4).softmax(-1)\n    TABLE[q.sum().item()] = (w @ v, w)\n"
    )
    table = (
        "def textbook_attention(q, k, v, mask=None):\n"
        "    return TABLE.get(q.sum().item(), (v, v))\n"
    )
    in_the_cell(work, source, table)


@hostile()
def patched_checks(work: Copy) -> None:
    """The checks are replaced where the student can reach them."""
    source = (
        "import labsupport.checks as _c, labsupport.checks.verdict as _v\n\n"
        "for _name in dir(_c):\n    if _name.startswith('check_'):\n"
        "        setattr(_c, _name, lambda *a, **o: print('[ok]'))\n"
        "_v.judge = _v.call = lambda *a, **o: None\nchecks = _c"
    )
    in_the_cell(work, source)


@hostile()
def patched_testing(work: Copy) -> None:
    """numpy.testing, torch.testing, torch.equal and assert itself are made harmless."""
    source = (
        "import builtins, numpy.testing, torch.testing\n\nyes = lambda *a, **o: True\n"
        "for module in (numpy.testing, torch.testing):\n    for name in dir(module):\n"
        "        if name.startswith('assert'):\n            setattr(module, name, yes)\n"
        "torch.equal = torch.allclose = torch.Tensor.allclose = torch.Tensor.equal = yes\n"
        "builtins.AssertionError = type('AssertionError', (BaseException,), {})"
    )
    in_the_cell(work, source)


@hostile()
def silenced_tracebacks(work: Copy) -> None:
    """IPython is told to show no error and to run nothing more."""
    source = (
        "_shell, nothing = get_ipython(), lambda *a, **o: None\n"
        "_shell.showtraceback = _shell.showsyntaxerror = nothing\n"
        "_shell.set_custom_exc((BaseException,), lambda *a, **o: None)"
    )
    in_the_cell(work, source)


@hostile(memory=0, softmax=0)
def rewritten_cells(work: Copy) -> None:
    """IPython's transformers replace whatever is run later with `pass`."""
    source = (
        "import ast\n\n\nclass Nothing(ast.NodeTransformer):\n"
        "    def visit_Assert(self, node):\n        return ast.Pass()\n\n"
        "    def visit_Raise(self, node):\n        return ast.Pass()\n\n\n"
        "get_ipython().ast_transformers.append(Nothing())\n"
        "get_ipython().input_transformers_post.append(lambda lines: ['pass\\n'])"
    )
    work.write("attention", f"{source}\n\n\n{STUB}")
    for exercise in ("memory", "softmax"):
        work.write(exercise, f"# done\n{work.cell(exercise).source}")


@hostile()
def skips_itself(work: Copy) -> None:
    """pytest.skip from within: in a test run this would not be a failure."""
    in_the_call(work, "import pytest", "pytest.skip('not today')")


@hostile()
def exits_pytest(work: Copy) -> None:
    """pytest.exit with status 0, and an xfail mark."""
    in_the_call(work, "import pytest", "pytest.exit('all is well', returncode=0)")


@hostile()
def not_implemented_returned(work: Copy) -> None:
    """NotImplemented, for which Python's operators ask the other side."""
    in_the_call(work, "return NotImplemented, NotImplemented")


@hostile()
def raises_check_failed(work: Copy) -> None:
    """The lab's own exception, with a message that claims success."""
    source = "from labsupport.checks import CheckFailed"
    in_the_cell(work, source, "def textbook_attention(*a):\n    raise CheckFailed('[ok] passed')\n")
