"""SUMMARY.md: sections that are filled one after the other, and a list of what is missing.

The file is written anew after every step, whole or not at all. A small file beside it keeps some
room on the disk, so that the last words can be written even when the disk has run full.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from labsupport.profiling.trace.export import write_text

SUMMARY = "SUMMARY.md"
_ROOM = ".room-for-the-summary"
_ROOM_BYTES = 256 * 1024
_MARKS = {
    "waiting": "not reached",
    "running": "running",
    "done": "done",
    "partly": "partly",
    "skipped": "not here",
    "failed": "failed",
    "interrupted": "interrupted",
}


class NotHereError(RuntimeError):
    """What a step needs is not on this machine; `remedy` says how to get it."""

    def __init__(self, why: str, remedy: str = "") -> None:
        super().__init__(why)
        self.remedy = remedy


@dataclass
class Section:
    """One part of the summary, and how far it came."""

    title: str
    state: str = "waiting"
    parts: list[str] = field(default_factory=list)

    def add(self, *parts: str) -> None:
        """Append paragraphs or tables; empty ones are left out."""
        self.parts += [part for part in parts if part]


@dataclass(frozen=True)
class Missing:
    """What is not in the folder, why, and how to get it."""

    what: str
    why: str
    remedy: str = ""


class Report:
    """The summary of a folder.

    Args:
        folder: where SUMMARY.md goes; it must exist.
        title: what was profiled.
        opening: a line under the title: the command.
        sections: their titles by key, in the order of the summary.
        tell: is told the title of each step when it begins.

    Attributes:
        short: the findings that come first, a sentence each.
        missing: what is not there.
        interrupted: what ended the command early, in words; empty if nothing did.
    """

    def __init__(
        self,
        folder: Path,
        title: str,
        opening: str,
        sections: dict[str, str],
        tell: Callable[[str], None] = lambda words: None,
    ) -> None:
        self._tell = tell
        self.folder, self.title, self.opening = folder, title, opening
        self.sections = {key: Section(words) for key, words in sections.items()}
        self.short: list[str] = []
        self.missing: list[Missing] = []
        self.files: dict[str, str] = {}
        self.interrupted = ""
        self.signal = "Control-C"  # what a KeyboardInterrupt stands for
        self.finished = False
        self.unwritten = ""
        with contextlib.suppress(OSError):
            (folder / _ROOM).write_bytes(b"\0" * _ROOM_BYTES)

    def step(self, key: str, work: Callable[[Section], None]) -> None:
        """Do one step; whatever it raises is told in the summary, and the next step can follow.

        After an interrupt nothing more is done.
        """
        section = self.sections[key]
        if self.interrupted:
            return
        section.state = "running"
        self._tell(section.title)
        self.write()
        try:
            work(section)
            section.state = "done" if section.state == "running" else section.state
        except NotHereError as why:
            section.state = "skipped"
            self.lost(section.title, str(why), why.remedy)
        except KeyboardInterrupt:
            section.state = "interrupted"
            self.interrupted = self.signal
            self.lost(section.title, f"interrupted by {self.interrupted}; the part above is kept")
        except Exception as error:
            section.state = "failed" if not section.parts else "partly"
            self.lost(section.title, explained(error))
        self.write()

    def lost(self, what: str, why: str, remedy: str = "") -> None:
        """Note that something is missing, once."""
        entry = Missing(what, why, remedy)
        if entry not in self.missing:
            self.missing.append(entry)

    @contextlib.contextmanager
    def keeping(self, section: Section, what: str) -> Iterator[None]:
        """A part of a step that can fail alone, such as writing one file."""
        try:
            yield
        except NotHereError as why:
            self.lost(what, str(why), why.remedy)
        except Exception as error:
            section.state = "partly"
            self.lost(what, explained(error))

    def finish(self) -> None:
        """The last words; the room that was kept for them is given back."""
        for section in self.sections.values():
            if section.state == "waiting" and self.interrupted:
                self.lost(section.title, f"not reached: interrupted by {self.interrupted}")
        self.finished = True
        with contextlib.suppress(OSError):
            (self.folder / _ROOM).unlink()
        self.write()

    @property
    def failed(self) -> bool:
        """Whether something could not be gathered that this machine could give."""
        return any(section.state in ("failed", "partly") for section in self.sections.values())

    def write(self) -> None:
        """Write SUMMARY.md; a disk that is full even for that is noted in `unwritten`."""
        for attempt in (1, 2):
            try:
                write_text(self.folder / SUMMARY, self.text())
                self.unwritten = ""
                return
            except OSError as error:
                self.unwritten = explained(error)
                if attempt == 1:
                    with contextlib.suppress(OSError):
                        (self.folder / _ROOM).unlink()

    def text(self) -> str:
        """The whole summary."""
        state = "complete" if self.finished else "**still running**"
        if self.interrupted:
            state = f"**interrupted** by {self.interrupted}: what was gathered until then is here"
        elif self.finished and self.failed:
            state = "**not complete**: see [what is missing](#what-is-missing-and-why)"
        lines = [f"# {self.title}", f"{self.opening}  \nState: {state}."]
        if self.short:
            lines += ["## In short", "\n".join(f"- {finding}" for finding in self.short)]
        number = 0
        for section in self.sections.values():
            if section.state in ("waiting", "skipped") and not section.parts:
                continue
            number += 1
            note = "" if section.state == "done" else f" ({_MARKS[section.state]})"
            lines += [f"## {number}. {section.title}{note}", *section.parts]
        lines += ["## What is missing, and why", self._missing(), *self._files()]
        return "\n\n".join(lines) + "\n"

    def _missing(self) -> str:
        from labsupport.analysis.profile.wording import markdown_table

        waiting = [one.title for one in self.sections.values() if one.state == "waiting"]
        if not self.finished and waiting:
            return f"Not done yet: {', '.join(waiting)}."
        if not self.missing:
            return "Nothing."
        rows = [[one.what, one.why, one.remedy] for one in self.missing]
        return markdown_table(["What", "Why", "How to get it"], rows)

    def _files(self) -> list[str]:
        from labsupport.analysis.profile.wording import markdown_table

        here = {name: about for name, about in self.files.items() if (self.folder / name).exists()}
        rows = [[f"[`{name}`]({name})", about] for name, about in here.items() if "/" not in name]
        inside: dict[str, list[str]] = {}
        for name, about in here.items():
            folder, _, file = name.partition("/")
            if file:
                inside.setdefault(folder, []).append(f"[`{file}`]({name}): {about}")
        rows += [[f"`{folder}/`", "; ".join(files)] for folder, files in inside.items()]
        return ["## Files", markdown_table(["File", "What it is"], rows)] if rows else []


def explained(error: BaseException) -> str:
    """An error in one line; our own errors say all that there is to say."""
    text = " ".join(str(error).split()) or "no further explanation"
    text = text if len(text) <= 400 else f"{text[:397]}..."
    return text if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {text}"


@contextlib.contextmanager
def ended_gently(report: Report) -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the work as Control-C does, so that the summary is written."""

    def interrupt(number: int, frame: types.FrameType | None) -> None:
        report.signal = signal.Signals(number).name
        raise KeyboardInterrupt

    old: dict[int, object] = {}
    if threading.current_thread() is threading.main_thread() and sys.platform != "win32":
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                old[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
