"""The doctor's report: every finding is documented, every form tells all of it, and the exit code follows."""

import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

from lockstep import cli
from lockstep.env import RankEnv
from lockstep.errors import WorldSizeMismatch
from lockstep.study.doctor import together
from lockstep.study.doctor.finding import PAGE, Finding, NotChecked, Severity
from lockstep.study.doctor.kinds import Kind
from lockstep.study.doctor.plan import Plan
from lockstep.study.doctor.record import from_record, to_json, to_record
from lockstep.study.doctor.report import Report, verdict, worst_first
from lockstep.study.doctor.show import show
from lockstep.study.doctor.together import Part, examine_together, merge
from lockstep.study.doctor.topics.versions import VersionFacts
from tests.contract.tree import REPO
from tests.unit.doctor_planted import FAULTS, LOOKS
from tests.unit.doctor_scripts import CHANGES

HANG = Finding(Kind.ACS_ON, Severity.HANG, "It [is] on.", "It hangs.", "Turn it off.", "setpci " + 30 * "long " + "end")
SLOW = Finding(Kind.DISK_SLOW, Severity.SLOW, "Slow.", "It waits.", "Another.", "df -h\nls", "train.py:3")
NOTE = Finding(Kind.UNSAFE_LOAD, Severity.NOTE, "Unsafe.", "Code runs.", "Say so.", "torch.load(f, weights_only=True)")
PLAN = Plan(devices=2, target="train.py")


def report(*findings, **changed):
    made = Report(
        PLAN, "node1", (("cores", "2 of 2 cores"),), worst_first(list(findings)), (NotChecked("GPUs", "no"),), 1.25
    )
    return replace(made, **changed)


def anchors():
    """The headings of the page, as links name them."""
    lines = (REPO / PAGE).read_text().splitlines()
    titles = [re.sub(r"[^\w\- ]", "", line.lstrip("#").strip()).lower() for line in lines if line.startswith("#")]
    return [title.replace(" ", "-") for title in titles]


def test_every_finding_has_one_heading_in_the_docs():
    assert [kind.value for kind in Kind if anchors().count(kind.value) != 1] == []


def test_every_finding_is_planted_in_a_test():
    elsewhere = {Kind.TASK_FAILS, Kind.LAST_BATCH_TINY, Kind.DATA_PARALLEL, Kind.RANKS_DO_NOT_MEET}
    planted = {fault.kind for fault in FAULTS} | {change.kind for change in CHANGES} | elsewhere
    assert set(Kind) - planted == set()


def test_commands_to_paste_exist():
    frozen = set((REPO / "tests/contract/cli_flags.txt").read_text().splitlines())
    pasted = [finding.paste for fault in FAULTS for finding in LOOKS[fault.topic](fault.facts)]
    flags = [flag for paste in pasted for line in paste.splitlines() for flag in trained_with(line)]
    assert len(flags) > 8
    assert [flag for flag in flags if f"lockstep train {flag}" not in frozen] == []


def trained_with(line):
    """The flags of ``lockstep train`` in a line."""
    command = re.search(r"lockstep train ([^#]*)", line)
    return [word for word in command[1].split() if word.startswith("--")] if command else []


def test_worst_comes_first():
    assert worst_first([NOTE, SLOW, HANG]) == (HANG, SLOW, NOTE)


@pytest.mark.parametrize(
    ("findings", "code", "text"),
    [
        ((), 0, "Nothing was found that would hang, falsify or slow this run."),
        ((NOTE, NOTE), 0, "Nothing was found that would hang, falsify or slow this run; 2 to note."),
        ((NOTE, SLOW), 1, "Found: 1 will be slow, 1 to note."),
        ((HANG, SLOW, NOTE), 1, "Found: 1 will hang or fail, 1 will be slow, 1 to note."),
    ],
)
def test_verdict_and_exit_code(findings, code, text):
    made = report(*findings)
    assert (made.exit_code, verdict(made)) == (code, text)


def test_the_record_tells_everything_and_is_read_again():
    made = report(HANG, SLOW, NOTE)
    record = json.loads(to_json(made))
    assert record["counts"] == {"hang": 1, "wrong": 0, "slow": 1, "note": 1}
    assert record["findings"][1] == {
        "kind": "disk-slow",
        "severity": "slow",
        "where": "train.py:3",
        "found": "Slow.",
        "cost": "It waits.",
        "fix": "Another.",
        "paste": "df -h\nls",
        "link": "docs/doctor.md#disk-slow",
    }
    assert from_record(record) == made


def shown(made, **console):
    file = io.StringIO()
    show(made, Console(file=file, width=100, highlight=False, **console))
    return file.getvalue()


def test_text_tells_everything_and_can_be_pasted():
    text = shown(report(NOTE, HANG, SLOW))
    lines = text.splitlines()
    assert lines[0] == "lockstep doctor: train.py as 2 ranks on CPU cores, seen from node1"
    assert f"           {HANG.paste}" in lines  # in one line, however long
    assert "    found  It [is] on." in lines
    assert "  disk-slow  train.py:3" in lines
    assert "    more   docs/doctor.md#disk-slow" in lines
    assert "  - GPUs, because no" in lines
    assert all(line == line.rstrip() for line in lines)
    order = [text.index(title) for title in ("Will hang or fail (1)", "Will be slow (1)", "To note (1)", "Not checked")]
    assert order == sorted(order)
    assert "\x1b" not in text
    assert "\x1b[" in shown(report(HANG), force_terminal=True)


def versions(rank, host="node1", torch="2.13.0"):
    return VersionFacts(rank, host, "3.12.1", torch, "0.1.0")


def test_ranks_of_one_machine_make_one_report():
    merged = merge([Part(versions(0), report(SLOW)), Part(versions(1), None)])
    assert (merged.host, merged.findings) == ("node1", (SLOW,))
    assert merged.seen[-1] == ("versions", "python 3.12.1, torch 2.13.0, lockstep 0.1.0; 2 ranks compared")


def test_machines_are_named_and_versions_compared():
    second = report(
        HANG, host="node2", seconds=3.0, not_checked=(NotChecked("GPUs", "no"), NotChecked("ACS", "no root"))
    )
    merged = merge([Part(versions(0), report(SLOW)), Part(versions(1, "node2", "2.11.0"), second)])
    assert (merged.host, merged.seconds) == ("node1, node2", 3.0)
    assert [(finding.kind.value, finding.where) for finding in merged.findings] == [
        ("versions-differ", ""),
        ("acs-on", "node2"),
        ("disk-slow", "train.py:3"),
    ]
    assert ("cores, node2", "2 of 2 cores") in merged.seen
    assert [missed.what for missed in merged.not_checked] == [
        "GPUs",
        "ACS on node2",
        "how fast the machines reach each other",
    ]


def test_what_the_meeting_disproves_is_a_note():
    faults = {fault.kind: fault for fault in FAULTS if fault.severity is Severity.HANG}
    kinds = (Kind.MASTER_ADDRESS, Kind.INTERFACE_LOOPBACK, Kind.INTERFACE_VIRTUAL, Kind.LOCKED_MEMORY)
    found = [LOOKS[faults[kind].topic](faults[kind].facts)[0] for kind in kinds]
    made = report(*found)
    merged = merge([Part(versions(0), made), Part(versions(1, "node2"), replace(made, host="node2"))])
    notes = [finding for finding in merged.findings if finding.severity is Severity.NOTE]
    assert [finding.kind for finding in notes] == list(kinds[:3])
    assert notes[0].found.endswith(" The ranks met all the same.")
    assert (merged.findings[0].kind, merged.findings[0].where) == (kinds[3], "node1, node2")
    on_gpus = replace(made, plan=replace(PLAN, on_gpus=True))
    severities = {finding.kind: finding.severity for finding in merge([Part(versions(0), on_gpus)]).findings}
    assert severities[Kind.INTERFACE_VIRTUAL] is Severity.HANG  # NCCL has not met


def test_parts_travel_as_plain_values():
    part = Part(versions(1), report(HANG))
    assert Part.from_record(json.loads(json.dumps(part.to_record()))) == part
    assert to_record(report())["findings"] == []


def test_ranks_that_do_not_meet_are_told(monkeypatch):
    def fail(**_):
        raise WorldSizeMismatch("Rank 1 did not come.\nCheck that it was started.")

    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    env = RankEnv.from_environ(ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    monkeypatch.setattr(together, "init", fail)
    monkeypatch.setattr(together, "examine", lambda *_: report(NOTE))
    made, code = examine_together(PLAN, env, {})
    assert code == 1
    assert [finding.kind for finding in made.findings] == [Kind.RANKS_DO_NOT_MEET, Kind.UNSAFE_LOAD]
    assert made.findings[0].found == "Rank 1 did not come."
    assert made.findings[0].fix == "Check that it was started."
    assert made.not_checked[-1] == NotChecked("versions across ranks", "the ranks did not meet")
    assert examine_together(PLAN, replace(env, rank=1, local_rank=1), {}) == (None, 1)


@pytest.fixture
def doctor(tmp_path, monkeypatch, capsys):
    """Give ``doctor(*args)``: exit code, output and errors of the command, on this machine, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)

    def run(*args):
        code = cli.main(["doctor", *args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_the_command_looks_at_a_script(doctor, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch.distributed as dist\ndist.init_process_group()\nif rank == 0:\n    dist.barrier()\n"
    )
    code, out, err = doctor("train.py", "--devices", "1", "--json")
    assert (code, err) == (1, "")
    record = json.loads(out)
    (finding,) = [finding for finding in record["findings"] if finding["where"]]
    assert (finding["kind"], finding["where"]) == ("collective-on-one-rank", "train.py:4")
    assert record["exit_code"] == 1
    assert record["seen"]["script"] == "train.py starts ranks; it was read, not run"
    code, out, _ = doctor("train.py", "--devices", "1")
    assert code == 1
    assert "    found  dist.barrier is for all ranks, but only those with `rank == 0` come to it." in out.splitlines()
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["none.py"], "lockstep: none.py does not exist.\nName a Python file, or leave it out.\n"),
        (["bad.py"], "lockstep: bad.py, line 1: SyntaxError: '(' was never closed\n    x = (\n"),
        (["--devices", "0"], "Error: Invalid value for '--devices': 0 is not in the range x>=1.\n"),
        (["--nnodes", "two"], "Error: Invalid value for '--nnodes': 'two' is not a valid integer range.\n"),
    ],
)
def test_wrong_usage_has_an_exit_code_of_its_own(doctor, tmp_path, args, message):
    (tmp_path / "bad.py").write_text("x = (\n")
    code, out, err = doctor(*args)
    assert (code, out) == (2, "")
    assert err.endswith(message)


def test_help_teaches(doctor):
    code, out, _ = doctor("--help")
    assert code == 0
    assert "lockstep doctor train.py --devices 4" in out
    assert (
        "Exit codes: 0 nothing worse than notes; 1 the run will hang, fail, be wrong or be slow; 2 wrong usage" in out
    )
