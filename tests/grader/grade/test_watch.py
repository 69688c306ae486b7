"""Submissions that reach for solutions in the sandbox: none gets one unseen."""

import importlib
import sys

import pytest
import torch

from grader.grade.plan import Step
from grader.grade.results import Settings
from grader.grade.sandbox import Sandbox, package_folder, without_solutions
from grader.remote.watch import ANSWERS
from labsupport.attention import standard_attention
from labsupport.paths import project_root

if sys.platform != "linux":
    pytest.skip("grading needs Linux", allow_module_level=True)

BEFORE = """
import dis, functools, gc, importlib, inspect, linecache, pathlib, sys, threading, types
import labsupport
from labsupport.attention import attention, flash_attention, standard_attention
from labsupport.attention import standard_attention as mine
import labsupport.attention.reference as reference
kept = functools.partial(standard_attention)
table = {"f": standard_attention}
package = pathlib.Path(labsupport.__file__).parent
class Wrapped:
    def __call__(self, q, k, v): return standard_attention(q, k, v)
wrapped = Wrapped()
"""
# How a student's function may come to somebody else's textbook attention.
CALLS = {
    "direct": "return standard_attention(q, k, v)[0]",
    "alias": "return mine(q, k, v)[0]",
    "partial": "return kept(q, k, v)[0]",
    "in a dict": "return table['f'](q, k, v)[0]",
    "a class that wraps it": "return wrapped(q, k, v)[0]",
    "getattr": "return getattr(labsupport.attention, 'standard_' + 'attention')(q, k, v)[0]",
    "importlib": "m = importlib.import_module('labsupport.attention'); "
    "return m.standard_attention(q, k, v)[0]",
    "sys.modules": "m = sys.modules['labsupport.attention.reference']; "
    "return m.standard_attention(q, k, v)[0]",
    "vars": "return vars(reference)['standard_attention'](q, k, v)[0]",
    "the garbage collector": "return next(f for f in gc.get_objects() if isinstance(f, "
    "types.FunctionType) and f.__name__ == 'standard_attention')(q, k, v)[0]",
    "its oracle": "return reference.oracle_attention(q, k, v)[0].float()",
    "a backend's name": "return attention(*(x[:, None].transpose(1, 2) for x in (q, k, v)), "
    "backend='standard').transpose(1, 2)[:, 0]",
    "the tiled one": "from labsupport.attention.flash_torch import flash_attention_forward as f; "
    "return f(q, k, v, False)[0]",
    "an import in the call": "import labsupport.analysis.traffic as t; "
    "return standard_attention(q, k, v)[0]",
    "a thread": "out = []; t = threading.Thread(target=lambda: out.append(mine(q, k, v)[0])); "
    "t.start(); t.join(); return out[0]",
    "solution_or_reference": "from labsupport import checks; "
    "return checks.solution_or_reference(standard_attention, standard_attention)(q, k, v)[0]",
}
# How it may come to a text that holds one.
READS = {
    "inspect": "return inspect.getsource(standard_attention)",
    "open": "return open(reference.__file__).read()",
    "pathlib": "return (package / 'attention' / 'flash_torch.py').read_text()",
    "linecache": "return ''.join(linecache.getlines(str(package / 'attention/online_softmax.py')))",
    "compiled": "return next((package / 'attention' / '__pycache__').glob('ref*')).read_bytes()",
    "dis": "return dis.code_info(standard_attention)",
    "a loader": "return reference.__loader__.get_source(reference.__name__)",
}
# How it may come to its caller's objects: a rehearsal's log, a meeting of ranks.
FINDS = {
    "referrers": "gc.get_referrers(q)",
    "objects": "gc.get_objects()",
    "a frame": "sys._getframe(1).f_locals",
    "inspect's frame": "inspect.currentframe().f_back.f_locals",
    "inspect's stack": "inspect.stack()",
    "frames of threads": "sys._current_frames()",
    "a traceback": "try: 1 / 0\n    except ZeroDivisionError as e: e.__traceback__.tb_frame.f_back",
}
# Where solutions stand that are not in the sandbox at all.
ABSENT = {
    "a check's solution": "from labsupport.checks import ex_1_1_textbook_attention as t; "
    "return t.textbook_attention",
    "by its name": "from labsupport import checks; return checks.ex_2_9_loss_scaling.lost_share",
    "its mistakes": "from labsupport.checks import ex_2_7_flex as t; return t.CAP_MISTAKES",
    "the notebooks": "return next(package.parent.rglob('*.ipynb'))",
    "the tests": "return next(package.parent.rglob('test_*.py'))",
    "its text": "return next(f for f in package.rglob('*.py') if 'def ' + 'lost_share' "
    "in f.read_text())",
}
# What honest functions do.
HONEST = {
    "their own": "return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v",
    "a docstring": "'A library call of standard_attention.'; torch = __import__('torch'); "
    "return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v",
    "libraries that ask for frames": "import collections, logging, traceback, warnings\n"
    "    collections.namedtuple('A', 'a'); logging.info('x'); warnings.warn('y')\n"
    "    try: 1 / 0\n    except ZeroDivisionError: traceback.format_exc()\n"
    "    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """By function: its result, None if it raised, and the notes of it; and the right answer."""
    functions = list({**CALLS, **READS, **FINDS, **ABSENT, **HONEST}.values())
    cells = [BEFORE, "x = __import__('torch').ones(1, 2, 4)\nkept(x, x, x)"]  # to compare with
    cells += [f"def f{n}(q, k, v):\n    {body}" for n, body in enumerate(functions)]
    q, k, v = torch.randn(3, 1, 6, 4, generator=torch.Generator().manual_seed(0))
    found = {}
    with Sandbox(Settings(unconfined=True)) as box:
        session = box.run([Step(cell) for cell in cells], 60)
        for n, body in enumerate(functions):
            try:
                given = session.remote(f"f{n}")(q, k, v)
            except Exception:
                given = None
            found[body] = given, session.notes
            session.notes = []
    return found, standard_attention(q, k, v)[0]


@pytest.mark.parametrize("way", CALLS)
def test_no_call_of_an_answer_is_unseen(way, answers):
    (given, notes), right = answers[0][CALLS[way]], answers[1]
    assert given is None or torch.allclose(given, right, atol=1e-5)
    assert given is None or any(note.startswith(("calls", "imports")) for note in notes)


@pytest.mark.parametrize("way", READS)
def test_no_answer_is_read_unseen(way, answers):
    given, notes = answers[0][READS[way]]
    assert given is None or any(note.startswith("reads") for note in notes), notes


@pytest.mark.parametrize("way", FINDS)
def test_nobody_looks_for_a_harness_and_its_objects_unseen(way, answers):
    assert any(note.startswith("looks for") for note in answers[0][FINDS[way]][1])


@pytest.mark.parametrize("way", ABSENT)
def test_solutions_of_the_exercises_are_not_there(way, answers):
    assert answers[0][ABSENT[way]][0] is None


@pytest.mark.parametrize("way", HONEST)
def test_honest_functions_leave_no_note(way, answers):
    (given, notes), right = answers[0][HONEST[way]], answers[1]
    assert torch.allclose(given, right, atol=1e-5)
    assert notes == []


def test_every_exercise_imports_without_its_solution():
    files = sorted((package_folder() / "labsupport" / "checks").glob("[a-z]*.py"))
    assert len(files) > 30
    for file in files:
        full = (project_root() / "labsupport" / "checks" / file.name).read_text(encoding="utf-8")
        assert file.read_text(encoding="utf-8") == without_solutions(full)
        namespace = {"__name__": f"labsupport.checks.{file.stem}_cut", "__file__": str(file)}
        module = type(sys)(namespace["__name__"])
        sys.modules[module.__name__] = module  # dataclasses look there
        vars(module).update(namespace)
        exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), vars(module))
        assert "MISTAKES" not in vars(module)


def test_the_watched_files_exist():
    for one in ANSWERS:
        importlib.import_module(f"labsupport.{one.replace('/', '.')}")
