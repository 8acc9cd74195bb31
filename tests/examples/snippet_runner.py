"""Runs the code blocks of the pages, handed over as JSON on stdin, one after the other
in an empty folder each.

One JSON line on stdout says how each went. A ``try`` in a block shows an error: when
none comes, that is one.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import io
import json
import os
import sys
import tempfile
import traceback


class _ErrorsMustCome(ast.NodeTransformer):
    """Puts a failure behind the body of every ``try`` that has handlers."""

    def visit_Try(self, node: ast.Try) -> ast.Try:
        self.generic_visit(node)
        if node.handlers:
            message = f"line {node.lineno} of this block shows an error, and none came"
            node.orelse.append(ast.parse(f"raise AssertionError({message!r})").body[0])
        return node


def run_block(source: str, name: str) -> None:
    """Run one block as a program.

    Raises:
        AssertionError: a ``try`` in it met no error, or what the block asserts does not
            hold.
    """
    tree = ast.fix_missing_locations(_ErrorsMustCome().visit(ast.parse(source, name)))
    exec(compile(tree, name, "exec"), {"__name__": "__main__"})


def main() -> None:
    """Run the (name, source) pairs on stdin, and end the process by ``os._exit``."""
    # Imports make many objects that live; to look for garbage among them again and
    # again, and to take them apart at the end, costs seconds.
    gc.set_threshold(200_000)
    for name, source in json.load(sys.stdin):
        problem = None
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.redirect_stdout(io.StringIO()),
        ):
            os.chdir(folder)
            try:
                run_block(source, name)
            except BaseException:
                problem = traceback.format_exc()
            os.chdir("/")
        print(json.dumps({"name": name, "problem": problem}), flush=True)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
