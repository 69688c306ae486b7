"""The file that a reader's browser needs besides the pages: MathJax, as one file.

Version 3 is the last that fits into a file: `tex-svg.js` draws letters as outlines, so it needs no
fonts, and brings the assistive MathML that screen readers speak. It is fetched once, out of a PyPI
package that carries MathJax 3.2.2, and stays in the lab's cache.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from labsupport.models.sources.packages import Package, fetch_package
from labsupport.paths import cache_dir

MATHJAX = Package(
    registry="pypi",
    name="sphinx-mathjax-offline",
    version="0.0.2",
    size=6_233_114,
    sha256="206418155b2ff2f57496fb8501fdccae3da978e53031ff296c73729ba16062c4",
    files=("sphinx-mathjax-offline/static/mathjax/tex-svg.js",),
    license="Apache-2.0",
)


def fetch_file(package: Package) -> Path:
    """Return the one file that is needed of a package; fetch it if it is not in the cache.

    Raises:
        DownloadError: it cannot be fetched, or is not the expected one.
    """
    (name,) = (Path(path).name for path in package.files)
    folder = cache_dir() / "web" / f"{package.name}-{package.version}"
    if not (folder / name).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            fetch_package(package, Path(temporary))[0].replace(folder / name)
    return folder / name
