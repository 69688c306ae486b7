"""Imports go down only, between rooms and between files; every optional package has one door."""

import ast
import graphlib
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

import labsupport

# `grader` and `benchmarks` may import `labsupport`, and nothing else of ours.
OURS = {"labsupport", "grader", "benchmarks", "book", "capstone", "scripts", "tests"}
# In labsupport, a package may import those of the lines above its own, and itself.
LAYERS = """
attention
profiling
precision
analysis models
training
distributed
checks course
commands
cli
"""
LEVEL = {name: level for level, line in enumerate(LAYERS.split("\n")) for name in line.split()}
# Import nothing of ours. Everybody may import them.
LEAVES = {"paths", "interrupt", "plotting"}
OPTIONAL = ("flash_attn.cute", "flash_attn", "triton", "xformers")
# Kernels are defined when their file is imported. So Triton's doors are a folder and two files, and
# others import kernel files inside of functions only.
DOORS = {
    "triton": (
        "labsupport/attention/kernels/",
        "labsupport/models/generation/linear.py",
        "labsupport/distributed/ring/merge_kernel.py",
    )
}


@cache
def imports(path: str, source: str) -> list[tuple[str, bool]]:
    """Each module that a source file imports, and whether a function does it (lazily).

    `from a import b` counts as a.b: b may be a module.
    """
    tree = ast.parse(source)
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    found = []
    for node in ast.walk(tree):
        lazy = id(node) in inside
        if isinstance(node, ast.Import):
            found += [(alias.name, lazy) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = path.split("/")[: -node.level] if node.level else []
            base += [node.module] if node.module else []
            found += [(".".join([*base, alias.name]), lazy) for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found += [(str(n.value), lazy) for n in node.args[:1] if isinstance(n, ast.Constant)]
    return found


def upward_imports(files: dict[str, str]) -> list[str]:
    """The imports that break the layers. `files` maps paths such as labsupport/a/b.py to source."""
    wrong = []
    for path, source in files.items():
        product, own = Path(path).with_suffix("").parts[:2]
        allowed = {product, "labsupport"}
        for target, _ in imports(path, source):
            top, other = [*target.split("."), ""][:2]
            if top in OURS - allowed:
                wrong.append(f"{path} imports {target}, but {product} may not import {top}")
            if (product, top) != ("labsupport", "labsupport") or other in ("", own, "__version__"):
                continue
            if own in LEAVES:
                wrong.append(f"{path} imports {target}, but {own} imports nothing of ours")
            elif own not in LEVEL:
                wrong.append(f"{path}: {own} has no place in LAYERS")
            elif other not in LEAVES and LEVEL.get(other, 99) >= LEVEL[own]:
                wrong.append(f"{path} imports {target}, which is not below {own}")
    return wrong


def misplaced_optional_imports(files: dict[str, str]) -> list[str]:
    """Optional packages that are imported at import time, or in more than one file."""
    wrong, doors = [], {}
    kernels = {
        path.removesuffix(".py").replace("/", ".")
        for path, source in files.items()
        if any(name.split(".")[0] == "triton" and not lazy for name, lazy in imports(path, source))
    }
    for path, source in files.items():
        own = path.removesuffix(".py").replace("/", ".")
        for target, lazy in imports(path, source):
            if not lazy and own not in kernels and kernels & {target, target.rpartition(".")[0]}:
                wrong.append(f"{path} imports {target}, and with it Triton, outside of a function")
            package = next((p for p in OPTIONAL if f"{target}.".startswith(f"{p}.")), None)
            if package is None or path.startswith(DOORS.get(package, ())):
                continue
            doors.setdefault(package, set()).add(path)
            if not lazy:
                wrong.append(f"{path} imports {target} outside of a function")
    for package, paths in doors.items():
        if len(paths) > 1:
            wrong.append(f"{package} is imported in several places: {', '.join(sorted(paths))}")
    return wrong


def file_graph(files: dict[str, str]) -> dict[str, set[str]]:
    """The files that each file imports, in functions too; a package's name is its __init__.py."""
    home = {
        path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in files
    }
    graph: dict[str, set[str]] = {path: set() for path in files}
    for path, source in files.items():
        for target, _ in imports(path, source):
            while target and target not in home:
                target = target.rpartition(".")[0]
            if target and home[target] != path:
                graph[path].add(home[target])
    return graph


@pytest.fixture(scope="module")
def ours(project) -> dict[str, str]:
    files = [
        path
        for product in ("labsupport", "grader", "benchmarks")
        for path in sorted((project / product).rglob("*.py"))
        if ".ipynb_checkpoints" not in path.parts
    ]
    return {p.relative_to(project).as_posix(): p.read_text(encoding="utf-8") for p in files}


def test_imports_go_down_only(ours):
    assert upward_imports(ours) == []


def test_no_file_imports_itself_through_others(ours):
    graphlib.TopologicalSorter(file_graph(ours)).prepare()  # CycleError names the files of a circle


def test_an_optional_package_is_imported_in_one_place_and_lazily(ours):
    library = {path: source for path, source in ours.items() if path.startswith("labsupport/")}
    assert misplaced_optional_imports(library) == []


def test_every_folder_of_the_package_is_an_attribute_of_it(project):
    for folder in (project / "labsupport").glob("*/__init__.py"):
        name = folder.parent.name
        assert labsupport.__getattr__(name).__name__ == f"labsupport.{name}"


def test_every_command_has_a_file(project):
    from labsupport.cli import app

    names = {command.name for command in (*app.registered_commands, *app.registered_groups)}
    files = {path.stem for path in (project / "labsupport/commands").glob("*.py")} - {"__init__"}
    assert files == names - {"grade", "release"}


def test_programs_that_are_started_by_name_are_there(ours):
    called = re.compile(r'"-m", "((?:labsupport|benchmarks|grader)[.\w]*)"')
    names = {name for source in ours.values() for name in called.findall(source)}
    assert names
    assert [name for name in names if importlib.util.find_spec(name) is None] == []
