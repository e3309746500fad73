"""One file, one idea: files stay short enough to be read in one go."""

from tests.contract.tree import REPO, num_lines, sources

MAX_SOURCE_LINES = 300
MAX_EXAMPLE_LINES = 99


def too_long(paths, limit):
    return [f"{path.relative_to(REPO)}: {num_lines(path)} lines" for path in paths if num_lines(path) > limit]


def test_source_files_are_short():
    assert too_long(sources(), MAX_SOURCE_LINES) == [], "split them by idea"


def test_examples_are_short():
    examples = sorted((REPO / "examples").glob("*.py"))
    assert examples
    assert too_long(examples, MAX_EXAMPLE_LINES) == []


def test_too_long_counts_lines(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.contract.test_sizes.REPO", tmp_path)
    (tmp_path / "long.py").write_text("x = 1\n" * 3)
    assert too_long([tmp_path / "long.py"], 3) == []
    assert too_long([tmp_path / "long.py"], 2) == ["long.py: 3 lines"]
