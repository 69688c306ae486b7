"""Stand-ins for programs that shell scripts call."""

from pathlib import Path


def program(path: Path, body: str) -> None:
    """Write an executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
