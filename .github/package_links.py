"""Write the repository's addresses into pyproject.toml and README.md, before a release is built from them.

    python .github/package_links.py https://forge.example/owner/name v1.2.0

The tree has none of them: a fork's release links to the fork, and pages of the tree link to one another. An index shows
README.md alone, where links between files lead nowhere.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_LINK = re.compile(
    r"(?P<picture>!?)\[(?P<text>[^\[\]]*)\]\((?!https?:|#)(?P<target>[^()\s]+)\)"
)


def urls(repository: str, tag: str) -> str:
    """Return lines of ``project.urls``."""
    pages = {
        "Repository": repository,
        "Documentation": f"{repository}/blob/{tag}/docs/index.md",
        "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
    return "".join(f'{name} = "{page}"\n' for name, page in pages.items())


def with_addresses(readme: str, repository: str, tag: str) -> str:
    """Return Markdown whose links to files of the tree are addresses of them at a tag."""

    def address(link: re.Match[str]) -> str:
        kind = "raw" if link["picture"] else "blob"
        return f"{link['picture']}[{link['text']}]({repository}/{kind}/{tag}/{link['target']})"

    return _LINK.sub(address, readme)


def main(repository: str, tag: str, root: Path = Path()) -> None:
    """Change both files in a folder."""
    project, readme = root / "pyproject.toml", root / "README.md"
    before, heading, after = project.read_text().partition("[project.urls]\n")
    if not heading:
        raise SystemExit("pyproject.toml has no [project.urls]")
    project.write_text(before + heading + urls(repository, tag) + after)
    readme.write_text(with_addresses(readme.read_text(), repository, tag))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
