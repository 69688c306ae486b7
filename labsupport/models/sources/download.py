"""One file over https: with progress, resumed where it broke off, checked, and in one piece.

A download grows in `NAME.part` beside its place, and is renamed when its length and its SHA-256
are right. So a file under its own name is always whole, and an interrupted download goes on where
it stopped. A lock lets one process at a time write the part.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from tqdm import tqdm

TIMEOUT_S = 30.0
ATTEMPTS = 4  # in a row that bring nothing
BLOCK = 1 << 18
# What a server says when it is worth asking again.
PASSING = {408, 416, 425, 429, 500, 502, 503, 504}


class DownloadError(RuntimeError):
    """A file could not be fetched, or is not the one that was asked for."""


def download(
    url: str, to: str | Path, *, size: int, sha256: str, pause_s: float = 1.0, title: str = ""
) -> Path:
    """Fetch a file whose length and SHA-256 are known. Proxies and SSL_CERT_FILE are honoured.

    Args:
        url: https (http serves for tests: the SHA-256 is what the content is trusted for).
        to: where it will lie. A whole file there is kept; its folder is created.
        size: its length in bytes.
        sha256: its SHA-256, in hexadecimal.
        pause_s: seconds before the first new attempt; they double from one to the next.
        title: what a progress bar calls it, on a terminal.

    Returns:
        `to`.

    Raises:
        DownloadError: no connection, a refusal by the server, or other content than expected;
            what has the wrong content is deleted.
        ValueError: another kind of address.
    """
    from filelock import FileLock

    if urlsplit(url).scheme not in ("https", "http"):
        raise ValueError(f"{url} is not a web address: it must begin with https://")
    place = Path(to)
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_name(f"{place.name}.part")
    with FileLock(f"{place}.lock"):
        if place.is_file() and holds(place, size, sha256):
            return place
        _fill(url, part, size, pause_s, title or place.name)
        check(part, size, sha256, url)
        part.replace(place)
    return place


def check(path: Path, size: int, sha256: str, origin: str) -> None:
    """Delete a file that is not the expected one, and say so.

    Raises:
        DownloadError: another length or SHA-256.
    """
    if holds(path, size, sha256):
        return
    found = f"{path.stat().st_size:,} bytes with SHA-256 {digest(path)}"
    path.unlink()
    raise DownloadError(
        f"what came from {origin} is not the expected file: {found}, expected {size:,} bytes with "
        f"{sha256}. It was deleted. Try once more; if it happens again, a proxy or a mirror on the "
        "way changes files."
    )


def holds(path: Path, size: int, sha256: str) -> bool:
    """Whether a file has this length and SHA-256."""
    return path.stat().st_size == size and digest(path) == sha256


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fill(url: str, part: Path, size: int, pause_s: float, title: str) -> None:
    """Make `part` as long as the file, in as many connections as that takes."""
    from tqdm import tqdm

    have = part.stat().st_size if part.exists() else 0
    if have > size:
        part.unlink()
        have = 0
    # disable=None: no bar where nobody watches, as in a log or a notebook.
    with tqdm(total=size, initial=have, unit="B", unit_scale=True, desc=title, disable=None) as bar:
        fruitless, furthest = 0, have
        while have < size:
            unreachable = False
            try:
                _receive(url, part, size, bar)
                problem = "the connection ended early"
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, urllib.error.HTTPError) and error.code == 416:
                    part.unlink(missing_ok=True)  # it is no beginning of that file
                _give_up_if_final(url, error)
                problem = str(getattr(error, "reason", error)) or type(error).__name__
                unreachable = type(error) is urllib.error.URLError
            have = part.stat().st_size if part.exists() else 0
            # Who is offline should not wait long to hear so.
            fruitless = 0 if have > furthest else fruitless + (ATTEMPTS // 2 if unreachable else 1)
            furthest = max(furthest, have)
            if have < size:
                if fruitless >= ATTEMPTS:
                    kept = f" ({have:,} of {size:,} bytes are here, and kept)" if have else ""
                    raise DownloadError(f"{url} could not be fetched: {problem}{kept}.")
                time.sleep(pause_s * 2 ** max(0, fruitless - 1))


def _receive(url: str, part: Path, size: int, bar: tqdm) -> None:
    """Append what one connection brings; begin again where the server cannot resume."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(
        # No compression on the way: lengths and offsets are those of the file.
        url,
        headers={"Accept-Encoding": "identity", "User-Agent": "labsupport"},
    )
    if have:
        request.add_header("Range", f"bytes={have}-")
    bar.update(have - bar.n)
    with connect(request) as answer:
        resumed = have > 0 and answer.status == 206
        if resumed and not answer.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            part.unlink()  # some other piece: the next attempt begins at the beginning
            return
        start = have if resumed else 0
        length = answer.headers.get("Content-Length")
        if length is not None and start + int(length) != size:
            raise DownloadError(
                f"{url} has {start + int(length):,} bytes, not the expected {size:,}: it is "
                "another file. Is there a proxy or a login page in between?"
            )
        bar.update(start - bar.n)
        with part.open("ab" if resumed else "wb") as file:
            _copy(answer, file, size - start, bar)


def _copy(answer: IO[bytes], file: IO[bytes], wanted: int, bar: tqdm) -> None:
    while wanted > 0 and (block := answer.read(min(BLOCK, wanted))):
        file.write(block)
        bar.update(len(block))
        wanted -= len(block)


def _give_up_if_final(url: str, error: Exception) -> None:
    """Raise if asking again is of no use."""
    reason = getattr(error, "reason", error)
    if isinstance(error, urllib.error.HTTPError) and error.code not in PASSING:
        raise DownloadError(f"{url} could not be fetched: HTTP {error.code} {error.reason}")
    if isinstance(reason, ssl.SSLCertVerificationError):
        raise DownloadError(
            f"{url} could not be fetched: its certificate is not trusted here ({reason}). Behind a "
            "proxy that inspects traffic, name the proxy's certificate in SSL_CERT_FILE."
        )
    if isinstance(error, OSError) and not isinstance(
        error, urllib.error.URLError | ConnectionError | TimeoutError | ssl.SSLError
    ):
        raise error  # the disk, not the network


def connect(request: urllib.request.Request, timeout_s: float = TIMEOUT_S) -> Any:
    """Send a request, through the proxies that the environment names now; a context manager."""
    trusted = ssl.create_default_context()
    if "SSL_CERT_FILE" not in os.environ and not trusted.cert_store_stats()["x509_ca"]:
        # A Python from python.org finds no certificates on macOS.
        import certifi

        trusted.load_verify_locations(certifi.where())
    # Not urlopen, which goes on with the proxies of its first call.
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=trusted))
    return opener.open(request, timeout=timeout_s)
