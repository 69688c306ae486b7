"""The package that a sandbox imports: a copy without the answers, made once for a batch."""

import atexit
import compileall
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grader

_VARIABLE = "LABSUPPORT_GRADING_PACKAGE"
# The grader's own files that run in the student's process.
_KERNEL_SIDE = (
    "__init__.py",
    *(
        f"remote/{name}.py"
        for name in ["__init__", "kernel", "programs", "refuse", "values", "worker"]
    ),
)


@contextlib.contextmanager
def shared_package() -> Iterator[Path]:
    """Make the copy, for this process and the workers that it starts; remove it at the end."""
    from grader.exam import write_package

    if _VARIABLE in os.environ:
        yield Path(os.environ[_VARIABLE])
        return
    with tempfile.TemporaryDirectory(prefix="labsupport-grade-") as name:
        folder = Path(name).resolve()
        write_package(folder)
        (folder / "grader" / "remote").mkdir(parents=True)
        for path in _KERNEL_SIDE:
            shutil.copy(Path(grader.__file__).parent / path, folder / "grader" / path)
        # Compiled, so that no sandbox spends its time on that.
        compileall.compile_dir(folder, quiet=2, workers=1)
        folder.chmod(0o755)
        os.environ[_VARIABLE] = str(folder)
        try:
            yield folder
        finally:
            del os.environ[_VARIABLE]


def kernel_package() -> Path:
    """Return the folder to put on the sandbox's path; without a batch it stays until the end."""
    if _VARIABLE not in os.environ:
        stack = contextlib.ExitStack()
        atexit.register(stack.close)
        return stack.enter_context(shared_package())
    return Path(os.environ[_VARIABLE])
