"""The lab's answers, noted when a student's code calls them or reads their source.

Nothing is forbidden here: what is noted becomes a flag, "library call", for the instructor. The
watch runs in the student's process, so it is no wall: code that looks for it can stop it.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import labsupport

# Files and folders of the lab whose functions answer an exercise (of some, one function only), and
# other libraries' attention.
ANSWERS = (
    *("analysis/nsight", "analysis/predictor", "analysis/recommend", "analysis/roofline"),
    *("analysis/traffic", "attention/backends", "attention/flash_torch", "attention/fp8"),
    *("attention/kernels/forward", "attention/kernels/backward", "attention/kernels/decode"),
    *("attention/kernels/hopper", "attention/kernels/template", "attention/kernels/version1"),
    *("attention/online_softmax", "attention/reference", "attention/rotary"),
    *("distributed/minimal_ring", "distributed/ring", "models/flops", "models/llama2c"),
    *("precision/autofix", "precision/losses", "precision/policy", "profiling/tables"),
    *("profiling/grids", "training/chunked_loss", "training/planner"),
)
ONLY = {
    "precision.policy": "float16",
    "profiling.grids": "passes_of",
    "torch.nn.functional": "multi_head_attention_forward",
}
LIBRARIES = (
    *("transformers/integrations", "transformers/models"),
    *("torch/nn/modules/activation", "torch/nn/functional"),
)
# By these numbers leave PyTorch, so that a check that watches its operators sees no more of them.
LEAVES = {
    *("numpy", "tolist", "item", "__array__", "__dlpack__", "__float__", "__int__", "__index__"),
    *("data_ptr", "storage", "untyped_storage"),
}
MOST_NUMBERS = 32  # that may leave in one call: sizes, places, a maximum now and then
# By these (audit events, an attribute) a function finds what only a harness has, such as its log.
FINDS = {
    *("gc.get_objects", "gc.get_referrers", "gc.get_referents"),
    *("sys._getframe", "sys._current_frames", "tb_frame"),
}

_LAB = str(Path(labsupport.__file__).parent)
_CALLED = "_called_by_a_student"
# "<string>" are the methods that dataclasses write.
_TRUSTED = (
    *(_LAB, str(Path(__file__).parent), sys.prefix, sys.base_prefix, "<frozen ", "<string>"),
    str(Path(torch.__file__).parents[1]),  # where packages are that lie outside of sys.prefix
)


@cache
def answer_in(file: str) -> str:
    """Return the name of a watched module, by its source or compiled file; "" for others."""
    parts = [part for part in Path(file).parts if part != "__pycache__"]
    name = "/".join([*parts[:-1], parts[-1].split(".")[0]]) + "/" if parts else ""
    places = [(f"{_LAB}/", ANSWERS), ("/site-packages/", LIBRARIES)]
    for root, watched in places:
        inside = name.rpartition(root)[2] if root in name else ""
        if inside.startswith(tuple(f"{one}/" for one in watched)):
            return inside.strip("/").replace("/", ".")
    return ""


def by_student(frame: FrameType | None, *, whole: bool) -> bool:
    """Tell whether a student's code is above a frame: anywhere, or before any of the lab's."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_TRUSTED):
            return True
        if not whole and (file.startswith(_LAB) or frame.f_code.co_name == "_find_and_load"):
            return False
        frame = frame.f_back
    return False


class Watch:
    """Notes of what a student's code calls, imports and reads, until the process ends.

    A watched function's code is replaced by a call of it that leaves a note, so it does not matter
    under which name the student's code has the function.
    """

    def __init__(self) -> None:
        self.notes: set[str] = set()
        self.on, self.student = False, False  # a call is judged; of a function of the student's
        self.seen: set[str] = set()  # modules
        sys.addaudithook(self._audit)
        unwatched: Any = torch._C.DisableTorchFunction

        def noted() -> Any:
            if by_student(sys._getframe(1), whole=False):
                self.notes.add(f"{TAKES} a context that no watch sees")
            return unwatched()

        torch._C.DisableTorchFunction = noted  # type: ignore[misc, assignment]

    def taken(self) -> list[str]:
        """Return the notes since the last time, at most 20 of them."""
        notes, self.notes = sorted(self.notes)[:20], set()
        return notes

    @contextmanager
    def calls(self, *, student: bool) -> Iterator[None]:
        """Note calls inside the `with` block: all, or those that a student's code makes."""
        for name in sys.modules.keys() - self.seen:
            self.seen.add(name)
            with suppress(Exception):  # a student's own module may raise at any name
                module = sys.modules[name]
                if answer := answer_in(file := module.__file__ or ""):
                    self._replace(module, file, answer)
        self.on, self.student = True, student
        try:
            yield
        finally:
            self.on = False

    def _replace(self, module: ModuleType, file: str, answer: str) -> None:
        """Let all functions of a module, and of its classes, leave a note when they are called."""
        inner: dict[str, Any] = {}

        def called(name: str, args: Any, kwargs: Any) -> Any:
            if self.on and (self.student or by_student(sys._getframe(2), whole=True)):
                self.notes.add(f"calls {answer}.{name}")
            return inner[name](*args, **kwargs)

        places = [module, *(one for one in vars(module).values() if isinstance(one, type))]
        for one in (one for place in places for one in list(vars(place).values())):
            function = inspect.unwrap(getattr(one, "__func__", one))
            if isinstance(run := getattr(one, "run", None), MethodType) and hasattr(one, "fn"):
                name = str(getattr(one, "__name__", "kernel"))  # a kernel of Triton's
                inner[name] = run
                one.run = lambda *args, _own=name, **kwargs: called(_own, args, kwargs)
            elif isinstance(function, FunctionType) and not function.__closure__:
                code, name = function.__code__, function.__qualname__
                if code.co_filename == file and ONLY.get(answer, name) in (name, code.co_name):
                    inner[name] = FunctionType(code, function.__globals__, name)
                    inner[name].__defaults__ = function.__defaults__
                    inner[name].__kwdefaults__ = function.__kwdefaults__
                    function.__globals__[_CALLED] = called
                    source = f"lambda *args, **kwargs: {_CALLED}({name!r}, args, kwargs)"
                    function.__code__ = eval(source).__code__

    def _audit(self, event: str, given: tuple[Any, ...]) -> None:
        if (way := given[1] if event == "object.__getattr__" else event) in FINDS:
            if self.on:
                self.on = False  # or to ask for a frame would lead here again
                frame = sys._getframe(1)
                while frame.f_back and frame.f_code.co_filename == inspect.__file__:
                    frame = frame.f_back
                if not frame.f_code.co_filename.startswith(_TRUSTED):
                    self.notes.add(f"looks for other code's objects by {way}")
                self.on = True
            return
        if event == "open" and isinstance(given[0], str):
            name = answer_in(given[0])
        elif event == "object.__getattr__" and given[1] == "__code__":
            module = sys.modules.get(getattr(given[0], "__module__", None) or "")
            name = answer_in(getattr(module, "__file__", None) or "")
        elif event == "import" and self.on:
            name = answer_in(f"{_LAB}/{str(given[0]).partition('.')[2].replace('.', '/')}.py")
            if name and by_student(sys._getframe(1), whole=True):
                self.notes.add(f"imports {name}")
            return
        else:
            return
        if name and by_student(sys._getframe(1), whole=False):
            self.notes.add(f"reads {name}")


@cache
def _codes(name: str) -> dict[str, CodeType]:
    """Return the code of the functions in the source of a module of the lab's."""
    file = Path(_LAB).parent.joinpath(*name.split(".")).with_suffix(".py")
    found: dict[str, CodeType] = {}
    left = (
        [compile(file.read_bytes(), str(file), "exec", dont_inherit=True)] if file.exists() else []
    )
    for code in left:
        left += [one for one in code.co_consts if isinstance(one, CodeType)]
        if "<" not in code.co_qualname:
            found[code.co_qualname] = code
    return found


def changed(module: str) -> Iterator[str]:
    """Yield the functions, of a lab module and of those it uses, that are not its own any more.

    A harness, or a check's watch, runs in the student's process: who changes it gets a note.
    """
    names = {getattr(one, "__module__", None) for one in vars(sys.modules[module]).values()}
    for name in {module, *(one for one in names if str(one).startswith("labsupport."))}:
        if answer_in(f"{_LAB}/{str(name).partition('.')[2].replace('.', '/')}.py"):
            continue  # the watch itself has changed it
        for place, code in _codes(str(name)).items():
            live: Any = sys.modules.get(str(name))
            for part in place.split("."):
                live = inspect.getattr_static(live, part, None)
            for inner in ("__func__", "fget", "func"):  # of methods, properties, cached ones
                live = getattr(live, inner, live)
            is_function = code.co_flags & inspect.CO_OPTIMIZED  # and no class's body
            live = inspect.unwrap(live) if callable(live) else live
            if is_function and getattr(live, "__code__", None) != code:
                yield f"{name}.{place}"


class Leaving(TorchFunctionMode):
    """A watch on numbers that a student's code takes out of PyTorch; they become a note."""

    def __init__(self, notes: set[str]) -> None:
        super().__init__()
        self.notes, self.numbers, self.names = notes, 0, set[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in LEAVES and by_student(sys._getframe(1), whole=False):
            self.numbers += args[0].numel() if isinstance(args[0], torch.Tensor) else 0
            self.names.add(name.strip("_"))
            if self.numbers > MOST_NUMBERS:
                self.notes.add(f"{TAKES} {', '.join(sorted(self.names))}")
        return func(*args, **(kwargs or {}))


TAKES = "takes numbers out of PyTorch by"
