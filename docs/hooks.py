"""Links of the site: pages also are read in the repository, where they link to files
outside of this folder.

A few of those files become pages (`PAGES`). Links to other ones become the file's name,
since the site does not have them. A link to a file that is not there is an error, in
the repository's sense and so on the site.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
# Files outside of docs/ that are pages of the site, and as what.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "smp_core/AGENTS.md": "agents.md",
}
# Pictures that pages show and that lie elsewhere, too.
PICTURES = {
    "benchmarks/results/pipeline-timeline.png": "pictures/pipeline-timeline.png"
}
_CODE = re.compile(r"(^[ ]*```.*?^[ ]*```)", flags=re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[(?P<text>[^\[\]]*)\]\((?P<target>[^()\s]+)\)")
_ELSEWHERE = ("http://", "https://", "mailto:", "#")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that do not lie in docs/."""
    from mkdocs.structure.files import File

    for source, page in (PAGES | PICTURES).items():
        if page != "index.md":
            files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links that lead out of docs/."""
    sources = {
        name: ROOT / source for source, name in PAGES.items() if name != "index.md"
    }
    source = sources.get(page.file.src_uri, DOCS / page.file.src_uri)
    return for_the_site(markdown, source)


def for_the_site(text: str, source: Path) -> str:
    """Return a page's text with links as the site has them.

    Args:
        text: Markdown.
        source: the file it was read from; links are relative to it.

    Raises:
        ValueError: for a link to a file that does not exist.
    """

    def rewritten(match: re.Match[str]) -> str:
        target, hash_sign, anchor = match["target"].partition("#")
        if match["target"].startswith(_ELSEWHERE):
            return match[0]
        place = (source.parent / target).resolve()
        if not place.exists():
            raise ValueError(
                f"{source.relative_to(ROOT)} links to {target}, which is not there"
            )
        name = place.relative_to(ROOT).as_posix()
        on_site = (PAGES | PICTURES).get(name)
        if on_site is not None:
            return f"[{match['text']}]({on_site}{hash_sign}{anchor})"
        if place.is_relative_to(DOCS) and place.is_file():
            return (
                f"[{match['text']}]({os.path.relpath(place, DOCS)}{hash_sign}{anchor})"
            )
        return match["text"] if name in match["text"] else f"{match['text']} (`{name}`)"

    parts = _CODE.split(text)
    for number in range(0, len(parts), 2):  # the others are code
        parts[number] = _LINK.sub(rewritten, parts[number])
    return "".join(parts)
