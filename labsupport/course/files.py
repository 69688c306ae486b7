"""Safe writing of files: nothing is overwritten by accident, and no file is half written."""

import os
from pathlib import Path

# In the name of a student's copy as it was before an upgrade. A file browser lists it below the
# copy: ".ipynb" and ".md" come before it.
OLDER_EDITION = ".older-edition-"


def lies_beside(path: str) -> bool:
    """Tell whether the lab put this file beside a student's copy, when it was upgraded."""
    return OLDER_EDITION in Path(path).name


def write_new(path: Path, text: str | bytes) -> None:
    """Write a file that does not exist yet; a text is written as UTF-8.

    Raises:
        FileExistsError: it exists, even if it came into being a moment ago.
        OSError: it cannot be written.
    """
    try:
        with path.open("xb") as file:
            file.write(text.encode("utf-8") if isinstance(text, str) else text)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise FileExistsError(f"{path} exists and is left as it is") from None


def replace(path: Path, text: str | bytes) -> None:
    """Write a file in one step in place of an older one if there is one; a text as UTF-8.

    Raises:
        OSError: it cannot be written; the older one is then still there.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write_new(part, text)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
