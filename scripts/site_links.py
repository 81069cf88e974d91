"""A hook of mkdocs: files outside ``docs/`` to which pages link become files of the site."""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
FOLDER = "repository"
_LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]+)")


def _outside(page: str, link: str) -> Path | None:
    """Returns the path from the repository's root of a file outside ``docs/`` to which a page links."""
    path = Path(os.path.normpath(ROOT / "docs" / Path(page).parent / link))
    known = path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "docs") and path.exists()
    return path.relative_to(ROOT) if known else None


def on_files(files: Files, config: Any) -> Files:
    for page in list(files.documentation_pages()):
        for link in _LINK.findall(page.content_string):
            path = _outside(page.src_uri, link)
            uri = f"{FOLDER}/{path}.txt"
            if path is not None and (ROOT / path).is_file() and uri not in files.src_uris:
                files.append(File.generated(config, uri, content=(ROOT / path).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    here = Path(page.file.src_uri).parent

    def inside(found: re.Match[str]) -> str:
        path = _outside(page.file.src_uri, found[0])
        if path is None or f"{FOLDER}/{path}.txt" not in files.src_uris:
            return found[0]
        return os.path.relpath(f"{FOLDER}/{path}.txt", here)

    return _LINK.sub(inside, markdown)
