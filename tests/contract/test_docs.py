"""The Python of README and docs runs as it stands and prints what they say; links and commands lead somewhere."""

import json
import os
import re
import subprocess
import sys

import pytest

import lockstep
from tests.contract.blocks import PAGES, blocks, blocks_of
from tests.contract.run_blocks import run
from tests.contract.tree import PACKAGE, REPO
from tools.reference import Message, fill, messages, messages_sections

BLOCKS = blocks()
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
RUNNER = REPO / "tests" / "contract" / "run_blocks.py"


def run_here(blocks):
    """Return what each block printed, run in this process as ``__main__``."""
    own = sys.modules["__main__"]
    try:
        return {block.place: run(block.place, block.code) for block in blocks}
    finally:
        sys.modules["__main__"] = own


def run_on_two_ranks(blocks, folder):
    """Return what each block printed on rank zero, all of them run by the same processes."""
    todo, printed = folder / "blocks.json", folder / "printed.json"
    todo.write_text(json.dumps([(block.place, block.code) for block in blocks]))
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "run", "--devices", "2", str(RUNNER), str(todo), str(printed)],
        cwd=folder,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout
    return json.loads(printed.read_text())


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_blocks_run(num_ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    mine = [block for block in BLOCKS if num_ranks in block.num_ranks]
    assert len(mine) >= 3
    printed = run_here(mine) if num_ranks == 1 else run_on_two_ranks(mine, tmp_path)
    expected = {block.place: block.prints for block in mine if block.prints is not None}
    assert expected
    assert {place: printed[place] for place in expected} == expected


def test_the_script_of_the_readme_prints_the_same_before_and_after():
    before, after = (block for block in BLOCKS if block.place == next(iter(BLOCKS)).place)
    assert "lockstep" not in before.code
    assert after.prints == "norm of the weights: 2.7498\n"
    assert run_here([before]) == {after.place: after.prints}


def test_a_block_that_fails_is_named():
    (block,) = blocks_of("text\n\n```python\nx = 1\nassert x == 2\n```\n", "docs/page.md")
    with pytest.raises(AssertionError) as error:
        run_here([block])
    last = error.traceback[-1]
    assert (str(last.path), last.lineno + 1) == ("docs/page.md", 5)


@pytest.mark.parametrize("block", BLOCKS, ids=[block.place for block in BLOCKS])
def test_block_compiles(block):
    compile(block.code, block.place, "exec")


def test_marks():
    text = (
        "```python\na\n```\n<!-- fragment -->\n```python\nb\n```\n"
        "<!-- 1 and 2 ranks -->\n```diff\n x\n-old\n+new\n```\n<!-- prints -->\n```\nout\n```\n```bash\nls\n```\n"
    )
    assert [(block.place, block.code.strip(), block.num_ranks, block.prints) for block in blocks_of(text, "p.md")] == [
        ("p.md:2", "a", (1,), None),
        ("p.md:6", "b", (), None),
        ("p.md:10", "x\nold", (), None),
        ("p.md:10", "x\n\nnew", (1, 2), "out\n"),
    ]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(REPO)) for page in PAGES])
def test_links_lead_somewhere(page):
    prose = FENCED.sub("", page.read_text())
    targets = [target for target in re.findall(r"\]\(([^)#\s]+)", prose) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_commands_exist():
    """Every ``lockstep command --flag`` in a block is one that the command has."""
    known = (REPO / "tests" / "contract" / "cli_flags.txt").read_text()
    used = set()
    for page in PAGES:
        shell = [text for language, text in FENCED.findall(page.read_text()) if language in ("", "bash")]
        for block in shell:
            for command, rest in re.findall(r"^lockstep (\w+)\b(.*)$", block.replace("\\\n", " "), re.MULTILINE):
                # What follows belongs to a program, or is a remark.
                ours = re.split(r"#|  | -- |\.py " if command == "rehearse" else r"#|  | -- ", rest)[0]
                used |= {(page.name, command, flag) for flag in re.findall(r"(?<= )--[a-z][\w-]*", ours)}
    used = {flag for flag in used if flag[1] != "run"}  # which takes torchrun's as well
    assert len(used) > 30
    wrong = [
        (page, command, flag)
        for page, command, flag in sorted(used)
        if not re.search(rf"^lockstep {command} (?:\S*/)?{flag}(?![\w-])", known, re.MULTILINE)
    ]
    assert wrong == []


def test_every_public_name_is_in_the_reference():
    pages = (REPO / "docs" / "reference").glob("*.md")
    named = {name for page in pages for name in re.findall(r"^::: [\w.]*?(\w+)$", page.read_text(), re.MULTILINE)}
    assert set(lockstep.__all__) - {"__version__"} <= named


NOTES = sorted((REPO / "docs" / "design").glob("*.md"))


@pytest.mark.parametrize("note", NOTES, ids=lambda note: note.stem)
def test_a_design_note_names_what_exists(note):
    """Its names with an underscore or in camel case, and its files: read in code spans, and ``_names`` in drawings."""
    sources = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.c"), *(REPO / "tests").rglob("*.py")]
    words = set(re.findall(r"\w+", "\n".join(path.read_text() for path in sources)))
    words |= {path.stem for path in sources}
    text, drawings = note.read_text(), []
    text = FENCED.sub(lambda block: drawings.append(block[2]) or "", text)
    names = set(re.findall(r"[A-Za-z_]\w+", " ".join(re.findall(r"`([^`\n]+)`", text))))
    names = {name for name in names if "_" in name or re.search("[a-z][A-Z]", name)}
    names |= {name for drawing in drawings for name in re.findall(r"(?<![\w.])_[a-z]\w+", drawing)}
    assert names - words == set()
    files = {name for part in (text, *drawings) for name in re.findall(r"[\w/]+\.(?:py|c)\b", part)}
    assert [name for name in files if not [*REPO.glob(f"src/**/{name}"), *REPO.glob(name)]] == []


def test_messages_are_read_from_the_source(tmp_path):
    (tmp_path / "a.py").write_text(
        'ADVICE = "Give | another."\n'
        'raise ConfigurationError(f"No such {thing.name}.\\n" f"{ADVICE}")\n'
        "raise DataError(message)\n"
        'raise ValueError("not ours")\n'
    )
    assert messages(tmp_path) == [
        Message("ConfigurationError", "No such {thing.name}.\nGive | another.", "a.py"),
    ]
    table = messages_sections(tmp_path)
    assert (
        "| cause | what to do | raised in |\n| --- | --- | --- |\n"
        "| No such {thing.name}. | Give &#124; another. | a.py |"
    ) in table
    assert "## NonFiniteGradient\n\n" in table
    assert len(messages(PACKAGE)) > 200


def test_what_the_pages_take_from_the_source():
    pages = {page.stem: fill(page.read_text()) for page in (REPO / "docs" / "reference").glob("*.md")}
    assert [name for name, text in pages.items() if "from the source -->" in text] == []
    assert "| `global_batch_size` |" in pages["api"]
    assert "| `Duplicate GPU detected` | Two ranks use the same GPU. |" in pages["messages"]
    assert "| `exposed_s` | of a step: communication without overlap" in pages["metrics"]
    assert "| `train/loss` | `lockstep_train_loss` |" in pages["metrics"]
    assert "### threads-too-many\n" in pages["doctor"]


@pytest.mark.soak
def test_the_site_builds_and_needs_no_network(tmp_path):
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=REPO,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {path.relative_to(tmp_path / "site").as_posix(): path.read_text() for path in tmp_path.rglob("*.html")}
    assert len(pages) > len(PAGES) - 2
    loads = re.compile(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(\w+:[^"]+)')
    assert {url for page in pages.values() for url in loads.findall(page)} == set()
    assert "files/tests/distributed/test_ddp_parity.py.txt" in pages["promises.html"]
    assert "<code>global_batch_size</code>" in pages["reference/api.html"]
    assert "No files are given." in pages["reference/messages.html"]
