"""Judge a student's result, and name the likely mistake.

A typical mistake is an edit of the reference solution (`Mistake`). When a result is wrong, the
edited solutions (`mutant`) run on the same inputs; the one with the same result gives the
diagnosis. To teach a check a new mistake, add one entry to its table: the tests use it too.
"""

from __future__ import annotations

import ast
import linecache
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

LINE = 100  # letters: in a window of 1280 pixels JupyterLab shows 105


class CheckFailed(AssertionError):
    """A check found a mistake; the message says which one, as far as it can tell."""

    def _render_traceback_(self) -> list[str]:
        """Show the message alone in a notebook: the traceback through the checks helps nobody.

        In lines that fit into a window: JupyterLab breaks longer ones in the middle of a word.
        """
        return [
            line
            for paragraph in f"Check failed: {self}".split("\n")
            for line in textwrap.wrap(paragraph, LINE, break_long_words=False) or [""]
        ]


@dataclass(frozen=True)
class Mistake:
    """A typical mistake.

    Attributes:
        edit: of the reference solution's source: old text, new text, and so on in turns.
        say: the diagnosis.
    """

    edit: tuple[str, ...]
    say: str


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
    """Return a function's or autograd function's text; `inspect` finds no class that is sealed."""
    code = getattr(solution, "forward", solution).__code__
    text = "".join(linecache.getlines(code.co_filename))
    (node,) = (n for n in ast.parse(text).body if getattr(n, "name", "") == solution.__name__)
    return f"{ast.get_source_segment(text, node)}\n"


def results(
    solution: Any,  # a function or a class
    mistakes: Iterable[Mistake],
    run: Callable[[Any], Any],
) -> Iterator[tuple[str, Any]]:
    """Yield each mistake's diagnosis with what `run` makes of the mutant, unless that raises."""
    for mistake in mistakes:
        wrong = mutant(solution, mistake.edit)
        with suppress(Exception):
            yield mistake.say, run(wrong)


def equal(a: Tensor, b: Tensor) -> bool:
    """Compare two tensors: shapes and values."""
    return a.shape == b.shape and torch.equal(a, b)


def explain(
    given: Any,
    solution: Any,  # a function or a class
    mistakes: Iterable[Mistake],
    run: Callable[[Any], Any],
    same: Callable[[Any, Any], bool] = equal,
) -> str:
    """Return the diagnosis of the first mistake with the `same` result as given, otherwise ""."""
    return next((say for say, wrong in results(solution, mistakes, run) if same(given, wrong)), "")


def passed(what: str, seed: int = 0) -> None:
    """Tell the student that a check passed; a seed other than 0 drew other inputs."""
    print(f"[ok] {what}{' (other inputs)' if seed else ''}")


def call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a student's function; whatever keeps it from being judged becomes a clear failure.

    Raises:
        CheckFailed: the function is still a stub, raises, returns None, or changes its arguments.
    """
    name = getattr(function, "__name__", "your function")
    before = [arg.clone() if isinstance(arg, Tensor) else None for arg in args]
    try:
        result = function(*args, **options)
    except NotImplementedError:
        raise CheckFailed(
            f"{name} is not written yet: replace `raise NotImplementedError`."
        ) from None
    except CheckFailed:
        raise
    except Exception as error:
        raise CheckFailed(
            f"{name} raised {type(error).__name__}: {error}\n"
            f"It was called with {_describe(args, options)}."
        ) from error
    if result is None:
        raise CheckFailed(f"{name} returned None: is a `return` missing?")
    for position, (arg, old) in enumerate(zip(args, before, strict=True), start=1):
        if old is not None and not _same(arg, old):
            raise CheckFailed(
                f"{name} changed its argument number {position} in place (with `*=`, `+=` or a "
                "name that ends in `_`): its caller still needs it. Compute a new tensor instead."
            )
    return result


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def unpack(result: Any, names: Sequence[str]) -> tuple[Tensor, ...]:
    """Check that a student returned as many tensors as `names` says.

    Raises:
        CheckFailed: it is not a tuple of that length, or holds something that is no tensor.
    """
    wanted = ", ".join(names)
    if isinstance(result, Tensor) or not isinstance(result, tuple | list):
        raise CheckFailed(
            f"return {len(names)} values ({wanted}), not one {type(result).__name__}."
        )
    if len(result) != len(names):
        raise CheckFailed(f"return {len(names)} values ({wanted}), not {len(result)}.")
    for name, value in zip(names, result, strict=True):
        if not isinstance(value, Tensor):
            raise CheckFailed(f"{name} must be a tensor, not {type(value).__name__}.")
    return tuple(result)


def judge(
    name: str,
    result: Tensor,
    expected: Tensor,
    *,
    allowed: float,
    mistakes: Iterable[tuple[str, Tensor]] = (),
    dtype: torch.dtype | None = None,
) -> None:
    """Compare a result with what is expected, and name the mistake if it is wrong.

    Args:
        name: what the student calls it.
        result, expected: tensors; `expected` in float64 as a rule.
        allowed: largest absolute error that still passes.
        mistakes: diagnoses with the wrong results that they explain (`results`), in this order.
        dtype: the dtype the result must have, if that is part of the exercise.

    Raises:
        CheckFailed: wrong shape, dtype or values.
    """
    if result.shape != expected.shape:
        raise CheckFailed(
            f"{name} has shape {tuple(result.shape)}, but {tuple(expected.shape)} was expected."
        )
    if dtype is not None and result.dtype != dtype:
        raise CheckFailed(f"{name} has dtype {result.dtype}, but {dtype} was expected.")
    result, expected = result.detach().double(), expected.detach().double()
    if _close(result, expected, allowed):
        return

    def like(result: Tensor, wrong: Tensor) -> bool:
        wrong = wrong.detach().double()
        return wrong.shape == result.shape and _close(
            result, wrong, max(allowed, 1e-4), relative=1e-4
        )

    said = next((say for say, wrong in mistakes if like(result, wrong)), "")
    raise CheckFailed(f"{name} is wrong. {said or _where(result, expected, allowed)}")


def a_few_steps(expected: Tensor, *dtypes: torch.dtype) -> float:
    """Return what rounding alone may do to a result of few entries.

    flash-attn's rule takes the textbook's largest error as the yardstick, among thousands of
    entries. Among a few dozen it is now and then a fraction of one rounding, by luck, and twice
    that would refuse right work.

    Args:
        expected: the exact result.
        dtypes: in which it was computed and returned.

    Returns:
        three steps of the coarsest dtype, at the largest magnitude.
    """
    return 3 * max(torch.finfo(one).eps for one in dtypes) * float(expected.abs().max())


def _close(a: Tensor, b: Tensor, allowed: float, relative: float = 0.0) -> bool:
    same_places = torch.equal(a.isfinite(), b.isfinite()) and torch.equal(a.isnan(), b.isnan())
    finite = a.isfinite() & b.isfinite()
    infinities = torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num())
    if not finite.any():
        return same_places and infinities
    limit = allowed + relative * float(b[finite].abs().max())
    return same_places and infinities and float((a - b)[finite].abs().max()) <= limit


def _where(result: Tensor, expected: Tensor, allowed: float) -> str:
    """Say where a result goes wrong: NaN first, then infinities, then the first wrong row."""
    if (nan := result.isnan() & ~expected.isnan()).any():
        return (
            f"It holds {int(nan.sum())} NaN, the first at index {_first(nan)}: look for inf - inf, "
            "0 / 0, or exp of a large positive number."
        )
    if (inf := result.isinf() & ~expected.isinf()).any():
        return f"It holds {int(inf.sum())} infinities, the first at index {_first(inf)}."
    error = (result - expected).abs().nan_to_num(torch.inf)
    wrong = error > allowed
    return (
        f"{int(wrong.sum())} of {wrong.numel()} entries are wrong, "
        f"the first at index {_first(wrong)}: "
        f"{result[_first(wrong)].item():.4g} instead of {expected[_first(wrong)].item():.4g}. "
        f"Maximum error {error.max().item():.2g}, allowed {allowed:.2g}."
    )


def _first(where: Tensor) -> tuple[int, ...]:
    return tuple(where.nonzero()[0].tolist())


def _describe(args: tuple[Any, ...], options: dict[str, Any]) -> str:
    def one(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"a {str(value.dtype).removeprefix('torch.')} tensor {tuple(value.shape)}"
        return repr(value)

    parts = [one(value) for value in args] + [f"{k}={one(v)}" for k, v in options.items()]
    return ", ".join(parts)
