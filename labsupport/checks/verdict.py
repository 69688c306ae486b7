"""Judge a student's result, and name the likely mistake.

A typical mistake is an edit of the reference solution: an entry in an exercise's table
(`mistakes`). When a result is wrong, the edited solutions (`mutant`) run on the same inputs, and
the one with the same result gives the diagnosis; after them, every two of the edits together. To
name a new mistake, add one entry: the tests use it too.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import linecache
import math
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from labsupport import paths
from labsupport.checks.errors import (
    CheckFailed,
    CheckInterrupted,
    described,
    kind,
    not_written,
    outside_note,
    readable,
    remember,
)

Student = Callable[..., Any]  # a student's function
# Frames of an error in these folders are not the student's: the lab, libraries, the standard one.
NOT_THEIRS = (
    *(
        str(Path(file).parent)
        for file in (paths.__file__, Path(torch.__file__).parent, ast.__file__)
    ),
    str(Path(paths.__file__).parents[1] / "grader"),
)


SECONDS = 3.0  # of CPU time, for a diagnosis
PLURAL = ("weights", "positions", "chunks", "gradients")
_TWO = "There may be two mistakes"
_TRITON = str(Path(torch.__file__).parents[1] / "triton")


# --- mistakes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mistake:
    """An edit of the reference solution (old text, new text, and so on), and its diagnosis."""

    edit: tuple[str, ...]
    say: str


def mistakes(table: str) -> tuple[Mistake, ...]:
    r"""Return the entries of a table of mistakes: each a diagnosis, then its edits, indented.

        The mask is ignored.
            if mask is not None -> if False

    An edit replaces a text of the solution wherever it occurs. `\n` is a line break; nothing after
    the arrow deletes the text.
    """
    entries = []
    for say, edits in re.findall(r"((?:^\S.*\n)+)((?:^ +.*\n)+)", table, re.MULTILINE):
        parts = [part for line in edits.splitlines() for part in re.split(" ->(?: |$)", line)]
        edit = tuple(part.strip().replace(r"\n", "\n") for part in parts)
        entries.append(Mistake(edit, " ".join(say.split())))
    return tuple(entries)


@cache
def mutant(solution: Callable[..., Any], edit: tuple[str, ...]) -> Callable[..., Any]:
    """Return the function (or class) again, compiled with its source edited; see `Mistake`.

    Raises:
        LookupError: an old text is not in the source.
    """
    source = _source(solution)
    for old, new in zip(edit[::2], edit[1::2], strict=True):
        if old not in source:
            raise LookupError(f"{solution.__name__} does not contain {old!r}")
        source = source.replace(old, new)
    scope: dict[str, Any] = {}
    exec(source, vars(sys.modules[solution.__module__]), scope)
    return scope[solution.__name__]


@cache
def _source(solution: Any) -> str:
    """Return the text of a function, or of a class."""
    text = "".join(linecache.getlines(inspect.getsourcefile(solution) or ""))
    (node,) = (n for n in ast.parse(text).body if getattr(n, "name", "") == solution.__name__)
    return f"{ast.get_source_segment(text, node)}\n"


def results(
    solution: Any, mistakes: Iterable[Mistake], run: Callable[[Any], Any], pairs: bool = True
) -> Iterator[tuple[str, Any]]:
    """Yield each mistake's diagnosis with the result of `run(mutant)`, unless that raises.

    Args:
        solution, mistakes, run: the reference, its edits, and how to get a result.
        pairs: let every two mistakes together follow, until `SECONDS` are over.
    """
    mistakes, end = tuple(mistakes), time.process_time() + SECONDS
    for mistake in mistakes:
        wrong = mutant(solution, mistake.edit)
        with suppress(Exception):
            yield mistake.say, run(wrong)
    for one, two in itertools.combinations(mistakes, 2) if pairs else ():
        if time.process_time() > end:
            print(f"Gave up looking for the cause after {SECONDS:.0f} s: the message names none.")
            return
        with suppress(Exception):  # the second edit may not find its text any more
            wrong = run(mutant(solution, one.edit + two.edit))
            yield f"{_TWO}: {one.say} And: {two.say}", wrong


def equal(a: Tensor, b: Tensor) -> bool:
    """Compare two tensors: shapes and values."""
    return a.shape == b.shape and torch.equal(a, b)


def explain(
    given: Any, known: Iterable[tuple[str, Any]], same: Callable[[Any, Any], bool] = equal
) -> str:
    """Return the diagnosis of the first of `results` that is the `same` as given, otherwise ""."""
    return next((say for say, wrong in known if same(given, wrong)), "")


# --- a student's function -------------------------------------------------------------------------


def passed(what: str, seed: int = 0) -> None:
    """Print that a check passed; a seed other than 0 drew other inputs."""
    print(f"[ok] {what}{' (other inputs)' if seed else ''}")
    if note := outside_note():
        print(note)


def call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a student's function.

    Raises:
        CheckFailed: the function is still a stub, raises, returns None, or changes its arguments.
        CheckInterrupted: the reader stopped it.
    """
    name = getattr(function, "__name__", "your function")
    remember(function)
    before = [[leaf.clone() for leaf in _leaves(arg)] for arg in args]
    try:
        result = function(*args, **options)
    except NotImplementedError as error:
        if (line := own_line(error)) and "raise NotImplementedError" not in line:
            raise CheckFailed(_raised(function, error, args, options)) from error
        *_, (frame, _line) = traceback.walk_tb(error.__traceback__)
        last = frame.f_code.co_qualname.partition(".")[0]
        if callable(getattr(function, "__globals__", {}).get(last)):
            name = last  # the given function calls one, or a class, that is not written
        raise CheckFailed(not_written(name)) from None
    except CheckFailed:
        raise
    except Exception as error:
        raise CheckFailed(_raised(function, error, args, options)) from error
    except KeyboardInterrupt as error:
        raise CheckInterrupted(_raised(function, error, args, options)) from None
    if result is None:
        raise CheckFailed(f"{name} returned None: is a `return` missing?")
    for position, (arg, clones) in enumerate(zip(args, before, strict=True), start=1):
        leaves = list(_leaves(arg))
        pairs = zip(leaves, clones, strict=False)
        if len(leaves) != len(clones) or not all(
            equal(leaf.nan_to_num(), clone.nan_to_num()) for leaf, clone in pairs
        ):
            raise CheckFailed(
                f"{name} changed its argument number {position} in place (by `*=`, `+=`, a name "
                "that ends in `_`, or a method of a list), but its caller still needs it. Compute "
                "a new one."
            )
    return result


def within(harness: Callable[..., Any], student: Any) -> Student:
    """Return what calls `harness(student, ...)` where the student's code is.

    In the grader that is another process, which finds the harness, a function of a module's, by its
    name: what students say about their own work is not asked for.
    """
    there = getattr(student, "within", None)

    def run(*arguments: Any) -> Any:
        return there(harness, *arguments) if there else harness(student, *arguments)

    run.__name__ = getattr(student, "__name__", "your function")
    return run


def _raised(
    function: Callable[..., Any],
    error: BaseException,
    args: Sequence[Any],
    options: Mapping[str, Any],
) -> str:
    """Say what a student's function raised, in which of its lines, and how it was called."""
    name = getattr(function, "__name__", "your function")
    where = own_line(error)
    said = f"{name} raised {type(error).__name__}{where or ': '}{error}"
    if isinstance(error, KeyboardInterrupt):
        said = f"{name} was{where.rstrip() or ' running'}"
    given = not where or "lambda" in where  # the exercise's own call of the student's function
    if isinstance(error, TypeError) and given and "argument" in str(error):
        said += "\nKeep the names of the parameters as they are in the exercise's first line."
    elif re.search(r"\.T\b", where) and any(leaf.ndim > 2 for leaf in _leaves(args)):
        said += "\n`.T` reverses all dimensions; `.mT` swaps the last two."
    elif "type c10::Half without overflow" in str(error):
        said += "\nfloat16 ends at 65,504, and a number like -1e9 is beyond it: use -inf."
    elif "max(): Expected reduction dim" in str(error):
        said += (
            "\nA tensor without entries has no maximum. Compare first, and use any(): "
            "(x >= limit).any() is False where there are none."
        )
    elif "Use .reshape(...) instead" in str(error):
        said += (
            "\n`view` cannot exchange dimensions, and the `.reshape` that PyTorch advises mixes "
            "them up in a copy: use transpose."
        )
    elif "must match the size of tensor b" in str(error):
        said += (
            "\nShapes are compared from their last dimension. One number for each row needs a last "
            "dimension of 1 (keepdim=True, or x[..., None]), one for each position or column a 1 "
            "further to the left (x[:, None]). In a loop, the last block may be shorter."
        )
        if re.search(r"\*[^()]*@", where):
            said += " And `a * b @ c` means `(a * b) @ c`."
    names: list[str] = []
    with suppress(ValueError):  # some built-in functions have no signature
        parameters = inspect.signature(function).parameters.values()
        names = [f"{p.name}: " for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = itertools.zip_longest(names[: len(args)], args, fillvalue="")
    shown = [f"{name}{described(value)}" for name, value in named]
    shown += [f"{key}: {described(value)}" for key, value in options.items()]
    return f"{said}\nIt was called with {', '.join(shown)}."


def own_line(error: BaseException) -> str:
    """Return the last line of the student's own that an error went through; "" if unknown."""
    own: list[traceback.FrameSummary] = []
    cause: BaseException | None = error
    while cause is not None:  # Triton's interpreter wraps what a kernel raised
        frames = traceback.extract_tb(cause.__traceback__)
        theirs = (*NOT_THEIRS, "<frozen", _TRITON)
        own = [f for f in frames if f.line and not f.filename.startswith(theirs)] or own
        cause = cause.__cause__
    return f" in line {own[-1].lineno}:\n    {own[-1].line}\n" if own else ""


# --- the kind of a result -------------------------------------------------------------------------


def _leaves(value: Any) -> list[Tensor]:
    if isinstance(value, list | tuple):
        return [leaf for one in value for leaf in _leaves(one)]
    return [value] if isinstance(value, Tensor) else []


def values(result: Any, names: Sequence[str]) -> tuple[Any, ...]:
    """Check that a student returned as many values as names; raise CheckFailed otherwise."""
    wanted = f"return {len(names)} values ({', '.join(names)})"
    if not isinstance(result, tuple | list):
        raise CheckFailed(f"{wanted}, not {kind(result)}.")
    if len(result) != len(names):
        raise CheckFailed(f"{wanted}, not {len(result)}.")
    return tuple(result)


def unpack(result: Any, names: Sequence[str]) -> tuple[Tensor, ...]:
    """Check that a student returned as many tensors as names; raise CheckFailed otherwise."""
    found = values(result, names)
    return tuple(tensor(value, name) for value, name in zip(found, names, strict=True))


def tensor(value: Any, name: str = "the result") -> Tensor:
    """Check that a student returned one tensor; raise CheckFailed otherwise."""
    if not isinstance(value, Tensor):
        raise CheckFailed(f"{name} must be one tensor, not {kind(value)}.")
    return value


def number(value: Any, name: str) -> float:
    """Check that a student returned a number that is not NaN; raise CheckFailed otherwise.

    A tensor or array with a single number counts as one.
    """
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise CheckFailed(f"{name} must be a number, not {kind(value)}.")
    if math.isnan(value):
        raise CheckFailed(f"{name} is NaN: did a row without a measurement get in, or 0 / 0?")
    return value if isinstance(value, int) else float(value)


# --- tensors --------------------------------------------------------------------------------------


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype)


def judge(
    name: str,
    result: Tensor,
    expected: Tensor,
    *,
    allowed: float,
    mistakes: Iterable[tuple[str, Tensor]] = (),
    dtype: torch.dtype | None = None,
) -> None:
    """Compare a result with the expected one, and name the mistake if it is wrong.

    Args:
        name: of the result, for the message.
        result, expected: tensors; `expected` in float64 as a rule.
        allowed: largest absolute error that still passes.
        mistakes: diagnoses with the wrong results that they explain (`results`), in this order.
        dtype: the dtype that the result must have, if any.

    Raises:
        CheckFailed: wrong shape, dtype or values.
    """
    fits = result.shape == expected.shape
    if fits and dtype is not None and result.dtype != dtype:
        raise CheckFailed(f"{name} has dtype {result.dtype}, but {dtype} was expected.")
    result, expected = result.detach().double(), expected.detach().double()
    if fits and _close(result, expected, allowed):
        return
    near = max(allowed, 1e-4)
    are_wrong = "are wrong." if name.endswith(PLURAL) else "is wrong."
    shape = f"has shape {tuple(result.shape)}, but {tuple(expected.shape)} was expected."
    for say, wrong in mistakes:
        if say.startswith(_TWO) and not result.nan_to_num(0, 0, 0).any():
            break  # some two mistakes leave nothing but 0, NaN and infinities, as many others do
        wrong = wrong.detach().double()
        if wrong.shape != result.shape or (fits and _close(wrong, expected, allowed)):
            continue  # the second: an edit that changes something else
        if _close(result, wrong, near, relative=1e-4):
            raise CheckFailed(f"{name} {are_wrong if fits else shape} {say}", say)
    if not fits:
        raise CheckFailed(f"{name} {shape}")
    raise CheckFailed(f"{name} {are_wrong} {_location(result, expected, allowed)}")


def judge_call(
    student: Student,
    solution: Any,
    mistakes: Iterable[Mistake],
    arguments: Sequence[Any],
    names: Sequence[str],
    *,
    judged: Sequence[str] = (),
    where: str = "",
    allowed: float | None = None,
    factor: float = 2.0,
    dtype: torch.dtype | None = None,
    adapt: Callable[[Any], Callable[..., Any]] = lambda function: function,
    **options: Any,
) -> None:
    """Call a student's function, and judge its tensors by the reference in float64.

    By default an error may be `factor` times (for gradients 3 times) that of the reference in the
    inputs' own dtype, plus 1e-5, as in flash-attn's tests; or three roundings, since among few
    entries the reference's error can be tiny by luck.

    Args:
        student, solution, mistakes: the function, the reference, and its typical edits.
        arguments, options: of the call.
        names: of the returned tensors; one name stands for a tensor that is returned alone.
        judged: names of those to judge, in this order; all by default.
        where: begins the message, for example "(causal) ".
        allowed: largest absolute error.
        dtype: the dtype that the tensors must have, if any.
        adapt: makes the student's work, the reference and each mutant callable.

    Raises:
        CheckFailed: see `call`, `unpack` and `judge`.
    """

    def run(function: Any, arguments: Any) -> tuple[Tensor, ...]:
        result = call(adapt(function), *arguments, **options)
        return unpack(result, names) if len(names) > 1 else (tensor(result, names[0]),)

    given, exact = run(student, arguments), exactly(arguments)
    right, rounded = run(solution, exact), run(solution, arguments)
    for name in judged or names:
        i = names.index(name)
        wrong = results(solution, mistakes, lambda f, i=i: run(f, exact)[i])
        limit = _tolerance(rounded[i], right[i], factor) if allowed is None else allowed
        judge(where + name, given[i], right[i], allowed=limit, mistakes=wrong, dtype=dtype)


def exactly(value: Any) -> Any:
    """Return a tensor in float64, if it holds floating-point numbers; also those of a list."""
    if isinstance(value, list | tuple):
        return [exactly(one) for one in value]
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _tolerance(rounded: Tensor, right: Tensor, factor: float) -> float:
    finite = right.isfinite() & rounded.isfinite()
    if not finite.any() or not rounded.is_floating_point():
        return 1e-5
    error = float((rounded.double() - right)[finite].abs().max())
    steps = 3 * torch.finfo(rounded.dtype).eps * float(right[finite].abs().max())
    return max(factor * error + 1e-5, steps)


def _close(a: Tensor, b: Tensor, allowed: float, relative: float = 0.0) -> bool:
    finite = b.isfinite()
    if not torch.equal(a[~finite].nan_to_num(nan=0.5), b[~finite].nan_to_num(nan=0.5)):
        return False
    if not finite.any():
        return True
    limit = allowed + relative * float(b[finite].abs().max())
    return float((a - b)[finite].abs().max()) <= limit


def _location(result: Tensor, expected: Tensor, allowed: float) -> str:
    """Say where a result goes wrong: NaN first, then infinities, then the first wrong entry."""
    if (nan := result.isnan() & ~expected.isnan()).any():
        return (
            f"It holds {int(nan.sum())} NaN, the first at index {_first(nan)}: look for inf - inf, "
            "0 / 0, 0 times inf, exp of a large positive number, or torch.empty."
        )
    if (inf := result.isinf() & ~expected.isinf()).any():
        return f"It holds {int(inf.sum())} infinities, the first at index {_first(inf)}."
    error = (result - expected).abs().nan_to_num(torch.inf, posinf=torch.inf)
    wrong, largest = error > allowed, error.max().item()
    first = _first(wrong)
    ours, theirs = expected[first].item(), result[first].item()
    digits = next((n for n in (4, 8, 12) if f"{ours:.{n}g}" != f"{theirs:.{n}g}"), 17)
    said = f"Maximum error {largest:.2g}, allowed {allowed:.2g}." if largest < math.inf else ""
    return (
        f"{int(wrong.sum())} of {wrong.numel()} entries are wrong, the first at index {first}: "
        f"{theirs:.{digits}g} instead of {ours:.{digits}g}. {said}".rstrip()
    )


def _first(marked: Tensor) -> tuple[int, ...]:
    return tuple(marked.nonzero()[0].tolist())


# --- numbers --------------------------------------------------------------------------------------


def judge_numbers(
    student: Student,
    cases: Sequence[Mapping[str, Any] | tuple[Any, ...]],
    solution: Callable[..., Any],
    mistakes: Iterable[Mistake],
    names: Sequence[str],
    judged: Sequence[str] | None = None,
    *,
    close: float = 1e-9,
) -> None:
    """Judge the numbers that a student's function returns.

    A mistake that explains every case is named; one that explains every wrong case, and more than
    one, is named as a guess (two together are not: some two may add up to any number).

    Args:
        student, solution, mistakes: the function, the reference, and its typical edits.
        cases: options or arguments of the calls.
        names: of the returned values; one name stands for a number that is returned alone.
        judged: names of those to judge; all by default.
        close: relative error that passes.

    Raises:
        CheckFailed: another kind of result, or a wrong one.
    """
    kept = names if judged is None else judged

    def pick(result: Any) -> tuple[float, ...]:
        found = (result,) if len(names) == 1 else values(result, names)
        pairs = zip(names, found, strict=True)
        return tuple(number(value, name) for name, value in pairs if name in kept)

    def same(a: Sequence[tuple[float, ...]], b: Sequence[tuple[float, ...]]) -> bool:
        return all(
            math.isclose(x, y, rel_tol=close, abs_tol=1e-12)
            for one, other in zip(a, b, strict=True)
            for x, y in zip(one, other, strict=True)
        )

    def show(numbers: tuple[float, ...]) -> str:
        pairs = zip(kept, numbers, strict=True)
        return ", ".join(f"{name} {readable(value)}" for name, value in pairs)

    asked = [(case, {}) if isinstance(case, tuple) else ((), case) for case in cases]

    def run(function: Callable[..., Any]) -> list[tuple[float, ...]]:
        return [pick(function(*args, **options)) for args, options in asked]

    given = run(partial(call, student))
    right = run(solution)
    off = [i for i in range(len(asked)) if not same(right[i : i + 1], given[i : i + 1])]
    if not off:
        return
    (args, options), ours, theirs = asked[off[0]], right[off[0]], given[off[0]]
    known = list(results(solution, mistakes, run))
    say = explain(given, known, same)
    there = [(s, [w[i] for i in off]) for s, w in known if not s.startswith(_TWO)]
    if not say:
        guess = explain([given[i] for i in off], there, same) if len(off) > 1 else ""
        say = f"Expected {show(ours)}.{guess and f' Perhaps: {guess}'}"
    arguments = inspect.signature(solution).bind(*args, **options).arguments
    sizes = ", ".join(f"{key} {readable(value)}" for key, value in arguments.items())
    raise CheckFailed(f"for {sizes} you return {show(theirs)}. {say}")
