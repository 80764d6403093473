"""A hook of mkdocs. It adds the pages at the root of the repository (README, SECURITY...) to the site, and points links
to files outside the site to the repository.
"""

import posixpath
import re
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
LINK = re.compile(r"(\]\()(?!http|#)([^)#]+)")


def on_files(files: Files, config: Any) -> Files:  # Any: mkdocs' configuration is untyped
    """Adds the root's pages."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turns links that work in the repository into links that work on the site."""
    here = page.file.src_uri
    folder = "" if here in PAGES.values() else "docs"

    def relink(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        in_site = PAGES.get(target, target.removeprefix("docs/"))
        if files.get_file_from_path(in_site) is not None:
            return match[1] + in_site
        assert (ROOT / target).exists(), f"{here} links to {match[2]}, which does not exist"
        return f"{match[1]}{config.repo_url or 'https://github.com'}/blob/main/{target}"

    return LINK.sub(relink, markdown)
