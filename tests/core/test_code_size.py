"""The product does not become denser, and not poorer in comments, than
benchmarks/results/code_size.json says."""

from __future__ import annotations

import json

from benchmarks.code_size import RESULTS, ROOT, Size, by_room, size_of, total

# A branch of 2,000 lines may be that much denser than the rest; `python
# benchmarks/code_size.py` writes the file again.
TOLERANCE = 0.05

TEXT = '''"""A docstring."""

# A comment.
def add(a, b):  # another
    """Another docstring,
    of two lines."""

    return (
        a + b
    )
'''


def test_code_is_counted_without_docstrings_comments_and_indentation() -> None:
    """``def add ( a , b ) :`` has eight tokens, the rest ``return (``, ``a + b`` and
    ``)``."""
    assert size_of(TEXT) == Size(tokens=8 + 2 + 3 + 1, lines=4, comments=2)
    assert (size_of(TEXT) + Size(6, 1, 0)).tokens_per_line == 4
    assert size_of(TEXT).comments_per_100_lines == 50


DENSE = """
names = {key: [each.name for each in values] for key, values in found.items()}
for key in [key for key in names]:
    kept = [key for key in names]
if any(name for name in names) and all(name for name in names):
    pass
"""


def test_statements_with_several_comprehensions_are_counted() -> None:
    """Nested ones and those side by side; the loop has one in its own line and one in
    its body."""
    assert size_of(DENSE).dense == 2


def test_the_product_has_no_more_tokens_a_line_and_no_fewer_comments_than_the_file_says() -> (
    None
):
    committed = json.loads(RESULTS.read_text(encoding="utf-8"))["after"]["product"]
    now = total(by_room(ROOT))
    what = "say it in more lines (one comprehension or ternary a statement, intermediates with names)"
    assert now.tokens_per_line <= committed["tokens_per_line"] + TOLERANCE, what
    assert (
        now.comments_per_100_lines >= committed["comments_per_100_lines"] - TOLERANCE
    ), "say why, in comments"
    assert now.dense <= committed["dense_statements"], (
        "a statement has several comprehensions: " + what
    )
