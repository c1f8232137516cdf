"""The text that the model learns from: documentation in Debian packages whose licences permit it.

`unpack` has them from a folder of packages; every document is one page of the documentation. One page in fifty, chosen
by its name, is held out: training and tokenizer never see it.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

_HELD_OUT = 50  # one in so many


@dataclass(frozen=True)
class Document:
    """A page: where it is in its package, and its text."""

    name: str
    text: str

    @property
    def is_held_out(self) -> bool:
        return zlib.crc32(self.name.encode()) % _HELD_OUT == 0


@dataclass(frozen=True)
class Source:
    """A package's pages: files of a pattern below a folder, and how one becomes text."""

    package: str
    version: str
    licence: str
    folder: str
    pattern: str
    read: Callable[[str], str]


class _Page(HTMLParser):
    """The text of a page without its navigation; lines of `pre` stay."""

    _BLOCKS = re.compile("p|div|li|dt|dd|tr|table|pre|h[1-5]|ul|ol|dl")
    _CLASSES = ("navheader", "navfooter", "toc")

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._skipped = 0  # depth of elements inside one that is left out
        self._pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("br", "hr", "img", "link", "meta", "col", "input"):
            return
        kind = dict(attrs).get("class") or ""
        if self._skipped or tag in ("head", "script") or kind in self._CLASSES:
            self._skipped += 1
        self._pre += tag == "pre"
        if self._BLOCKS.fullmatch(tag) and not self._skipped:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if self._skipped:
            self._skipped -= 1
        self._pre -= tag == "pre"
        if self._BLOCKS.fullmatch(tag) and not self._skipped:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self.parts.append(data if self._pre else " ".join(f".{data}.".split())[1:-1])


def text_of_page(page: str) -> str:
    """The text of a page in HTML, its blocks apart by empty lines."""
    parser = _Page()
    parser.feed(page)
    lines = [line.rstrip() for line in "".join(parser.parts).split("\n")]
    kept = [line for i, line in enumerate(lines) if line or (i and lines[i - 1])]
    return "\n".join(kept).strip() + "\n"


SOURCES = (
    Source(
        "python3.11-doc",
        "3.11.2-6+deb12u9",
        "PSF-2.0",
        "usr/share/doc/python3.11/html/_sources",
        "**/*.rst.txt",
        str,
    ),
    Source(
        "postgresql-doc-15",
        "15.20-0+deb12u1",
        "PostgreSQL",
        "usr/share/doc/postgresql-doc-15/html",
        "*.html",
        text_of_page,
    ),
)


def unpack(packages: Path) -> Iterator[Document]:
    """All pages of the packages (`NAME_VERSION_all.deb`) in a folder, in the order of their names. Needs `dpkg-deb`.

    Raises FileNotFoundError for a package that is not there in the version that the model was trained with.
    """
    for source in SOURCES:
        package = packages / f"{source.package}_{source.version}_all.deb"
        if not package.exists():
            raise FileNotFoundError(
                f"{package}: `apt-get download {source.package}={source.version}` gets it, and"
                " snapshot.debian.org keeps every version"
            )
        with tempfile.TemporaryDirectory() as name:
            subprocess.run(["dpkg-deb", "-x", package, name], check=True)
            folder = Path(name) / source.folder
            for path in sorted(folder.glob(source.pattern)):
                page = path.read_text("utf-8", errors="replace")
                yield Document(f"{source.package}/{path.relative_to(folder)}", source.read(page))
