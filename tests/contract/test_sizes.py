"""Examples stay short enough to be read and copied, and the package does not grow unnoticed."""

import ast
import io
import tokenize

from tests.contract.tree import REPO, num_lines, sources

MAX_EXAMPLE_LINES = 99

# The goal is 30,900: a change that needs lines removes others. Lower this number with each removal.
MAX_CODE_LINES = 33_860

NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def test_examples_are_short():
    examples = sorted((REPO / "examples").glob("*.py"))
    assert examples
    long = [
        f"{path.relative_to(REPO)}: {num_lines(path)} lines" for path in examples if num_lines(path) > MAX_EXAMPLE_LINES
    ]
    assert long == []


def num_code_lines(text):
    """Number of lines with a token that is neither a comment nor a docstring."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, WITH_DOCSTRING) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def test_comments_docstrings_and_blank_lines_are_no_code():
    text = '"""A module.\n\nLong."""\n\n# why\nX = (\n    1,  # one\n)\n\n\n'
    text += 'def f():\n    """F."""\n    return """a\n    b"""\n'
    assert num_code_lines(text) == 6


def test_the_package_does_not_grow():
    assert sum(num_code_lines(path.read_text()) for path in sources()) <= MAX_CODE_LINES
