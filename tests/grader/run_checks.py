"""A program: run the exercises and all check cells of notebooks, without the cells between them.

    python run_checks.py FOLDER NOTEBOOK ...

The first line says which labsupport runs; then a line of JSON for each check cell: the notebook,
the cell's grade_id, "passed" or the kind of exception, and the message. Cells become files in
FOLDER, because Triton reads the source of a kernel from its file.
"""

import ast
import contextlib
import io
import json
import sys
from pathlib import Path

import labsupport


def run_notebook(notebook: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    cells = [cell | {"source": "".join(cell["source"])} for cell in cells]
    names: dict[str, object] = {"__name__": "exercises"}

    def run(source: str, name: str) -> None:
        file = folder / f"{name}.py"
        file.write_text(source, encoding="utf-8")
        exec(compile(source, str(file), "exec"), names)

    run("\n".join(imports_of(cells)), "imports")
    for cell in cells:
        about = cell["metadata"].get("nbgrader", {})
        if about.get("solution"):
            run(cell["source"], about["grade_id"])
        elif about.get("grade"):
            kind, said = "passed", ""
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    run(cell["source"], about["grade_id"])
            except Exception as error:
                kind, said = type(error).__name__, str(error)
            print(json.dumps([str(notebook), about["grade_id"], kind, said]))


def imports_of(cells: list) -> list[str]:
    found = []
    for cell in cells:
        if cell["cell_type"] == "code":
            tree = ast.parse(cell["source"])
            found += [
                ast.unparse(node)
                for node in ast.walk(tree)
                if isinstance(node, ast.Import | ast.ImportFrom)
            ]
    return found


if __name__ == "__main__":
    print(labsupport.__file__)
    for number, name in enumerate(sys.argv[2:]):
        run_notebook(Path(name), Path(sys.argv[1]) / str(number))
