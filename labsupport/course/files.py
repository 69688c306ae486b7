"""Writing files so that nothing is lost: new ones never replace, and none is ever half written."""

import os
import tempfile
from pathlib import Path

# In the name of a student's copy as it was before an upgrade. A file browser lists it below the
# copy: ".ipynb" and ".md" come before it.
OLDER_EDITION = ".older-edition-"
# What earlier editions of the lab wrote instead.
_EARLIER_NAMES = (".before-upgrade-", ".new-edition-")


def lies_beside(path: str) -> bool:
    """Whether the lab put this file beside a student's copy, when it was upgraded."""
    return any(mark in Path(path).name for mark in (OLDER_EDITION, *_EARLIER_NAMES))


def _write_beside(path: Path, text: str | bytes) -> Path:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    with os.fdopen(descriptor, "wb") as file:
        file.write(text.encode("utf-8") if isinstance(text, str) else text)
        file.flush()
        os.fsync(file.fileno())
    # mkstemp makes a file that only its owner can read; a course folder is often shared.
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(name, 0o666 & ~umask)
    return Path(name)


def write_new(path: Path, text: str | bytes) -> None:
    """Write a file that does not exist yet; it appears complete or not at all.

    Args:
        path: the file; its folder exists.
        text: what it will hold; a text is written as UTF-8.

    Raises:
        FileExistsError: it exists, even if it came into being a moment ago.
        OSError: it cannot be written.
    """
    if path.exists() or path.is_symlink():
        raise FileExistsError(f"{path} exists and is left as it is")
    part = _write_beside(path, text)
    try:
        os.link(part, path)
    except FileExistsError:
        raise FileExistsError(f"{path} exists and is left as it is") from None
    except OSError:
        # A file system without hard links (exFAT, some network shares). "x" refuses to replace.
        with path.open("xb") as file:
            file.write(part.read_bytes())
    finally:
        part.unlink()


def replace(path: Path, text: str) -> None:
    """Write a file in one step, in place of an older one if there is one.

    Args:
        path: the file; its folder exists.
        text: what it will hold, written as UTF-8.

    Raises:
        OSError: it cannot be written; the older one is then still there.
    """
    part = _write_beside(path, text)
    try:
        part.replace(path)
    except OSError:
        part.unlink()
        raise
