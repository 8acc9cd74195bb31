"""Tables of the pages name what is there: modules, the attributes that these read, and
messages of the code."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import yaml

from tests.core.documented import texts
from tests.harness import ROOT

# Of the pairs of neighbouring words of a message: those between values are the code's.
SHARE = 0.6


def rows_of(page: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (heading of the column "read in", or "", and the cells) of every row of
    every table."""
    heads: list[str] = []
    for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not cells or (set(cells[0]) <= {"-"} and cells[0]):
            continue
        if cells[0] in (
            "looked for",
            "where",
            "what happens to a rank",
            "what is written",
            "data",
            "by",
        ):
            heads = cells
        elif heads:
            yield (
                next((head for head in heads if head.startswith("read in")), ""),
                cells,
            )


def test_modules_of_the_page_on_model_classes_read_what_it_says() -> None:
    wrong = []
    for head, (looked_for, read_in, *_) in rows_of("model-classes.md"):
        base = re.findall(r"`(smp_core/.*?)`", head)[0]
        names = re.findall(r"`([\w/]+\.py)`", read_in)
        files = [
            ROOT / (name if name.startswith("smp_core/") else base + name)
            for name in names
        ]
        assert files, looked_for
        missing = [str(path) for path in files if not path.exists()]
        source = "".join(
            path.read_text(encoding="utf-8") for path in files if path.exists()
        )
        attributes = re.findall(r"`_?[\w.]*?(\w+)(?:\(.*?\))?`", looked_for)
        wrong += missing + [
            f"{names}: {name}" for name in attributes if name not in source
        ]
    assert wrong == []


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def test_messages_of_the_page_on_what_happens_are_those_of_the_code() -> None:
    said = " ".join(word for text in texts() for word in words_of(text))
    wrong, seen = [], 0
    for _, cells in itertools.chain(
        rows_of("what-happens.md"), rows_of("lost-ranks.md")
    ):
        for message in re.findall(r"`([^`]+)`", cells[1]):
            words = words_of(message) if " " in message else []
            pairs = [" ".join(pair) for pair in itertools.pairwise(words)]
            seen += bool(pairs)
            wrong += (
                []
                if sum(pair in said for pair in pairs) >= SHARE * len(pairs)
                else [message]
            )
    assert wrong == []
    assert seen > 20


def test_hooks_before_a_commit_are_what_make_lint_runs() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = {
        hook["entry"] for repository in config["repos"] for hook in repository["hooks"]
    }
    made = re.findall(
        r"^(?:style|types): \$\(STAMP\)\n((?:\t.*\n)+)",
        (ROOT / "Makefile").read_text(),
        re.MULTILINE,
    )
    lines = {
        line.strip().replace("$(BIN)", ".venv/bin")
        for block in made
        for line in block.splitlines()
    }
    assert hooks == lines and len(hooks) == 3
