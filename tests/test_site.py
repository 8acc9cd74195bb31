"""Links between pages lead somewhere, and every page has a place in the site's
navigation. `make docs` builds it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.harness import ROOT

DOCS = ROOT / "docs"
# Pages that are looked up in, not read: tables of everything, and what is generated.
REFERENCES = {
    *(
        "api",
        "architecture",
        "checkpoint-format",
        "configuration",
        "gpu",
        "migrating-from-smp",
        "optimizers",
        "upstream",
    ),
    "versions",
}
MOST_WORDS = 1500
_spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
assert _spec is not None and _spec.loader is not None
hooks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hooks)


@pytest.mark.parametrize(
    "page",
    [*sorted(DOCS.glob("*.md")), *(ROOT / name for name in hooks.PAGES)],
    ids=lambda p: p.name,
)
def test_links_lead_to_files(page: Path) -> None:
    hooks.for_the_site(page.read_text(encoding="utf-8"), page)


def test_links_out_of_the_folder_become_pages_or_names() -> None:
    text = "[a](../CHANGELOG.md) [b](../Makefile) [c](fp8.md#x) [d](https://e.org)\n```\n[x](none)\n```\n"
    said = hooks.for_the_site(text, DOCS / "index.md")
    assert (
        said
        == "[a](changelog.md) b (`Makefile`) [c](fp8.md#x) [d](https://e.org)\n```\n[x](none)\n```\n"
    )
    with pytest.raises(
        ValueError, match=r"docs/index.md links to none.md, which is not there"
    ):
        hooks.for_the_site("[x](none.md)", DOCS / "index.md")


def test_every_page_has_a_place_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    listed = re.findall(r"- ([\w-]+\.md)$", navigation, flags=re.MULTILINE)
    pages = {path.name for path in DOCS.glob("*.md")} | set(hooks.PAGES.values())
    assert sorted(listed) == sorted(pages)
    assert re.findall(r"^  - (\w+):$", navigation, flags=re.MULTILINE) == [
        "Start",
        "Guides",
        "Reference",
        "Internals",
    ]


def words_of(text: str) -> int:
    """Words of a page without its code blocks."""
    return len(
        re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL).split()
    )


def test_pages_are_short() -> None:
    words = {
        path.stem: words_of(path.read_text(encoding="utf-8"))
        for path in DOCS.glob("*.md")
    }
    assert words.keys() >= REFERENCES
    long = {name: count for name, count in words.items() if count > MOST_WORDS}
    assert {name: count for name, count in long.items() if name not in REFERENCES} == {}
