"""What a reader's browser needs besides the pages: MathJax, as one file.

Version 3 is the last that fits into a file: `tex-svg.js` draws letters as outlines, so it needs no
fonts, and brings the assistive MathML that screen readers speak. It is fetched once, from npm or a
mirror of it, known by its SHA-256, and kept in the cache of the lab.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from labsupport.models.sources.packages import Package, fetch_package, unpack
from labsupport.paths import cache_dir

MATHJAX = Package(
    registry="npm",
    name="mathjax",
    version="3.2.2",
    url="https://registry.npmjs.org/mathjax/-/mathjax-3.2.2.tgz",
    size=6_132_118,
    sha256="1b9c0a1c44df864e915690558e72adb9cc5203360daefd385084ced3b6c64c09",
    files=("package/es5/tex-svg.js",),
    license="Apache-2.0",
)


def fetch_file(package: Package, parent: Path | None = None) -> Path:
    """The one file that is needed of a package; fetched if the cache does not hold it.

    Raises:
        DownloadError: it cannot be fetched, or is not the expected one.
    """
    (name,) = (Path(path).name for path in package.files)
    folder = (parent or cache_dir()) / "web" / f"{package.name}-{package.version}"
    if not (folder / name).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            archive = fetch_package(package, Path(temporary))
            unpack(archive, package.files, Path(temporary))[0].replace(folder / name)
    return folder / name
