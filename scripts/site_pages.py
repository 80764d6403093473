"""A hook of mkdocs. It adds the pages at the root of the repository (README, SECURITY...) to the site, and names files
outside the site instead of linking to them. The reference is read from `build/reference`, where client and annexes are one
package, as in a wheel.
"""

import posixpath
import re
import shutil
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "SECURITY.md": "SECURITY.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
"""Pages outside of docs/, with their names in the site."""
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")


def on_startup(**_: Any) -> None:
    """Makes `build/reference`."""
    reference = ROOT / "build" / "reference"
    shutil.rmtree(reference, ignore_errors=True)
    for folder in (*filter(Path.is_dir, (ROOT / "plugins").iterdir()), ROOT / "art_client"):
        ignored = shutil.ignore_patterns("tests", "__pycache__")
        shutil.copytree(folder, reference, ignore=ignored, dirs_exist_ok=True)


def on_files(files: Files, config: Any) -> Files:  # Any: mkdocs' configuration is untyped
    """Adds the root's pages."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turns links that work in the repository into links that work on the site."""
    here = page.file.src_uri
    inside = posixpath.dirname(here)
    folder = "" if here in PAGES.values() else posixpath.join("docs", inside)

    def relink(match: re.Match[str]) -> str:
        text, link, anchor = match.groups(default="")
        target = posixpath.normpath(posixpath.join(folder, link))
        in_site = PAGES.get(target, target.removeprefix("docs/"))
        if files.get_file_from_path(in_site) is not None:
            return f"[{text}]({posixpath.relpath(in_site, inside or '.')}{anchor})"
        assert (ROOT / target).exists(), f"{here} links to {link}, which does not exist"
        return f"{text} (`{target}`)"

    return LINK.sub(relink, markdown)
