"""Files outside docs/ that pages link to become part of the site, at the same place."""

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
ROOT = DOCS.parent
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what pages link to outside docs/, and what is linked to from there."""
    pages = [DOCS / file.src_uri for file in files.documentation_pages()]
    for page in pages:
        for path in _linked(page):
            if DOCS not in path.parents and _place(path) not in files.src_uris:
                files.append(File.generated(config, _place(path), abs_src_path=str(path)))
                if path.suffix == ".md":
                    pages.append(path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between places in the site."""
    source = Path(page.file.abs_src_path)

    def moved(link: re.Match[str]) -> str:
        path = (source.parent / link[0]).resolve()
        return os.path.relpath(_place(path), Path(page.file.src_uri).parent) if path.is_file() else link[0]

    return LINK.sub(moved, markdown)


def _linked(page: Path) -> list[Path]:
    paths = [(page.parent / link).resolve() for link in LINK.findall(page.read_text(encoding="utf-8"))]
    return [path for path in paths if path.is_file()]


def _place(path: Path) -> str:
    """Return where a file of the repository is in the site."""
    return path.relative_to(DOCS if DOCS in path.parents else ROOT).as_posix()
