"""The gallery shows every command, in pictures that `make gallery` takes, are small, and need no network."""

import re

import pytest
from rich.text import Text

from lockstep.cli import COMMANDS
from tests.contract.tree import REPO
from tools import gallery

PAGE = (REPO / "docs" / "gallery.md").read_text()


def test_every_command_has_a_picture():
    parts = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
    shown = {command: re.findall(r"\]\(pictures/([\w-]+)\.svg\)", text) for command, text in parts.items()}
    assert set(shown) == set(COMMANDS)
    assert sorted(name for names in shown.values() for name in names) == sorted(["live", *gallery.SHOTS])
    taken = {name: shot.command.split()[0] for name, shot in gallery.SHOTS.items()} | {"live": "train"}
    assert all(taken[name] == command for command, names in shown.items() for name in names)


@pytest.mark.parametrize("name", ["live", *gallery.SHOTS])
def test_a_picture_is_small_and_needs_no_network(name):
    picture = (gallery.PICTURES / f"{name}.svg").read_text()
    assert len(picture) < gallery.MAX_BYTES
    assert not re.search(r"url\(['\"]?http|href=", picture)
    assert "$&#160;lockstep&#160;" in picture


def test_lines_that_were_taken_back_are_not_shown():
    written = "first\r\n\x1b[2mworking\x1b[0m\r\n50%\r\x1b[1A\x1b[J\x1b[1mdone\x1b[0m\r\nend"
    assert gallery.left_by(written) == ["first", "\x1b[1mdone\x1b[0m", "end"]


def test_a_picture_has_the_whole_of_long_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(gallery, "REPO", tmp_path)
    gallery.draw([Text("word " * 30 + "last")], tmp_path / "one.svg")
    assert "last" in (tmp_path / "one.svg").read_text()
