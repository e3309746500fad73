"""Examples stay short enough to be read and copied."""

from tests.contract.tree import REPO, num_lines

MAX_EXAMPLE_LINES = 99


def test_examples_are_short():
    examples = sorted((REPO / "examples").glob("*.py"))
    assert examples
    long = [
        f"{path.relative_to(REPO)}: {num_lines(path)} lines" for path in examples if num_lines(path) > MAX_EXAMPLE_LINES
    ]
    assert long == []
