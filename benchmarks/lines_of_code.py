"""Lines of code of `infinity/`, by folder and in total: no blank lines, no comments, no docstrings.

    python benchmarks/lines_of_code.py [--json]

A line counts if a token of Python is on it, or a part of one. A docstring is the string with which a module,
a class or a function begins. Stubs (`.pyi`) do not count.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_NO_CODE = {
    *(tokenize.ENCODING, tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}
_HAVE_DOCSTRINGS = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef


def lines_of_code(source: str) -> int:
    """Return how many lines of `source` have code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _HAVE_DOCSTRINGS) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    text = source.splitlines()
    return sum(bool(text[line - 1].strip()) for line in lines)


def count(package: Path) -> dict[str, int]:
    """Return the lines of each folder of `package`, without those of folders in it."""
    found: Counter[str] = Counter()
    for path in sorted(package.rglob("*.py")):
        found[path.parent.relative_to(package.parent).as_posix()] += lines_of_code(
            path.read_text(encoding="utf-8")
        )
    return dict(found)


def main() -> None:
    parser = argparse.ArgumentParser(description="Lines of code of infinity/.")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    as_json = parser.parse_args().json
    folders = count(ROOT / "infinity")
    total = sum(folders.values())
    if as_json:
        json.dump({"folders": folders, "total": total}, sys.stdout, indent=1)
        sys.stdout.write("\n")
        return
    for name, lines in {**folders, "total": total}.items():
        print(f"{name:24} {lines:6,}")


if __name__ == "__main__":
    main()
