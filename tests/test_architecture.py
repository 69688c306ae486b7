"""Imports go down only, and every optional package has one door: read off the source code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

# A package may import those of the lines above its own, and itself.
LAYERS = [
    {"attention"},
    {"profiling"},
    {"precision"},
    {"analysis", "models"},
    {"training"},
    {"distributed"},
    {"checks", "course"},
    {"commands"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# Import nothing of ours. Everybody may import them.
LEAVES = {"paths", "interrupt", "plotting"}
OPTIONAL = ("flash_attn.cute", "flash_attn", "triton", "xformers")
# Kernels are defined when their file is imported. So Triton's doors are two folders and a file, and
# others import kernel files inside of functions only.
DOORS = {
    "triton": (
        "labsupport/attention/flash_triton/",
        "labsupport/attention/kernels/",
        "labsupport/distributed/ring/merge_kernel.py",
    )
}
KERNELS = (
    *(
        f"labsupport.attention.flash_triton.{name}"
        for name in (
            *("tiles", "forward", "backward", "forward_hopper", "backward_hopper"),
            *("decode", "version1", "with_update"),
        )
    ),
    "labsupport.attention.kernels.forward_gluon",
    "labsupport.distributed.ring.merge_kernel",
)


def imports(source: str, package: str) -> Iterator[tuple[str, bool]]:
    """Each module that a source file imports, and whether a function does it (lazily).

    `package` resolves relative imports. `from a import b` counts as a.b: b may be a module.
    """
    tree = ast.parse(source)
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        lazy = id(node) in inside
        if isinstance(node, ast.Import):
            yield from ((alias.name, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            base += [node.module] if node.module else []
            yield from ((".".join([*base, alias.name]), lazy) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = node.func.id if isinstance(node.func, ast.Name) else name
            first = node.args[0]
            if name in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield str(first.value), lazy


def upward_imports(files: dict[str, str]) -> list[str]:
    """The imports that break the layers. `files` maps paths such as labsupport/a/b.py to source."""
    wrong = []
    for path, source in files.items():
        parts = Path(path).with_suffix("").parts
        if parts == ("labsupport", "__init__"):
            continue  # its lazy names are strings, checked by what `import labsupport` loads
        own = parts[1]
        for target, _ in imports(source, ".".join(parts[:-1])):
            if not target.startswith("labsupport."):
                continue
            other = target.split(".")[1]
            if other == own or other.startswith("__"):
                continue
            if own in LEAVES:
                wrong.append(f"{path} imports {target}, but {own} imports nothing of ours")
            elif own not in LEVEL:
                wrong.append(f"{path}: {own} has no place in LAYERS")
            elif other not in LEAVES and LEVEL.get(other, len(LAYERS)) >= LEVEL[own]:
                wrong.append(f"{path} imports {target}, which is not below {own}")
    return wrong


def misplaced_optional_imports(files: dict[str, str]) -> list[str]:
    """Optional packages that are imported at import time, or in more than one file."""
    wrong, doors = [], {}
    for path, source in files.items():
        for target, lazy in imports(source, path.rpartition("/")[0].replace("/", ".")):
            package = next((p for p in OPTIONAL if f"{target}.".startswith(f"{p}.")), None)
            if package is None:
                continue
            if path.startswith(DOORS.get(package, ())):
                continue
            doors.setdefault(package, set()).add(path)
            if not lazy:
                wrong.append(f"{path} imports {target} outside of a function")
        for target, lazy in imports(source, path.rpartition("/")[0].replace("/", ".")):
            kernels = any(f"{target}.".startswith(f"{name}.") for name in KERNELS)
            own = Path(path).with_suffix("").as_posix().replace("/", ".")
            if kernels and not lazy and own not in KERNELS:
                wrong.append(f"{path} imports {target}, and with it Triton, outside of a function")
    for package, paths in doors.items():
        if len(paths) > 1:
            wrong.append(f"{package} is imported in several places: {', '.join(sorted(paths))}")
    return wrong


@pytest.fixture(scope="module")
def ours(project) -> dict[str, str]:
    files = sorted((project / "labsupport").rglob("*.py"))
    kept = (p for p in files if ".ipynb_checkpoints" not in p.parts)
    return {str(p.relative_to(project)): p.read_text(encoding="utf-8") for p in kept}


def test_imports_go_down_only(ours):
    assert upward_imports(ours) == []


def test_an_optional_package_is_imported_in_one_place_and_lazily(ours):
    assert misplaced_optional_imports(ours) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("labsupport/attention/a.py", "import labsupport.profiling.timing"),
        ("labsupport/attention/a.py", "from labsupport import checks"),
        ("labsupport/attention/a.py", "from ..profiling import timing"),
        ("labsupport/attention/sub/a.py", "from ...profiling import timing"),
        ("labsupport/profiling/a.py", "from labsupport.precision.policy import x"),
        ("labsupport/precision/a.py", "from labsupport.analysis import x"),
        ("labsupport/profiling/a.py", "def f():\n    from labsupport.checks import x"),
        ("labsupport/profiling/a.py", "importlib.import_module('labsupport.commands')"),
        ("labsupport/plotting/a.py", "from labsupport.attention import backends"),
        ("labsupport/plotting/a.py", "from labsupport import paths"),
        ("labsupport/newcomer/a.py", "from labsupport.attention import backends"),
        ("labsupport/attention/a.py", "from labsupport.newcomer import x"),
    ],
)
def test_an_import_that_goes_up_is_found(path, source):
    assert len(upward_imports({path: source})) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("labsupport/attention/a.py", "from labsupport.attention.b import x\nfrom .c import y"),
        ("labsupport/attention/a.py", "import torch\nfrom labsupport import __version__"),
        ("labsupport/checks/a.py", "from labsupport.attention import x"),
        ("labsupport/checks/a.py", "from ..profiling import timing"),
        ("labsupport/profiling/a.py", "from labsupport import paths, plotting"),
        ("labsupport/cli.py", "def f():\n    from labsupport.commands import start"),
    ],
)
def test_an_import_that_goes_down_is_let_pass(path, source):
    assert upward_imports({path: source}) == []


def test_an_optional_import_outside_of_a_function_is_found():
    for source in ("import triton", "try:\n    import triton.language as tl\nexcept E:\n    pass"):
        assert len(misplaced_optional_imports({"labsupport/attention/a.py": source})) == 1


def test_a_second_door_to_an_optional_package_is_found():
    lazily = "def f():\n    from flash_attn import flash_attn_func"
    files = {"labsupport/attention/a.py": lazily, "labsupport/attention/b.py": lazily}
    assert "several places" in misplaced_optional_imports(files)[0]


def test_flash_attn_and_its_cute_subpackage_may_have_different_doors():
    two = "def f():\n    import flash_attn\n"
    four = "def f():\n    from flash_attn.cute import flash_attn_func\n"
    files = {"labsupport/attention/a.py": two, "labsupport/attention/b.py": four}
    assert misplaced_optional_imports(files) == []


def test_kernel_files_may_import_triton_and_others_may_not_import_kernel_files():
    kernel = {"labsupport/attention/flash_triton/forward.py": "import triton.language as tl"}
    assert misplaced_optional_imports(kernel) == []
    eager = "from labsupport.attention.flash_triton.forward import forward_kernel"
    for path in ("labsupport/attention/a.py", "labsupport/attention/flash_triton/launch.py"):
        assert len(misplaced_optional_imports({path: eager})) == 1
        assert misplaced_optional_imports({path: f"def f():\n    {eager}"}) == []
