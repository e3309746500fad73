"""What verify reports of what it found."""

import json
from dataclasses import replace

import pytest
from rich.console import Console

from lockstep.study.verify import causes
from lockstep.study.verify.causes import Findings
from lockstep.study.verify.fingerprint import DOUBLE, HALF, SINGLE, Difference, TraceComparison
from lockstep.study.verify.interventions import Subject
from lockstep.study.verify.verdict import (
    FIXES_OF_SCRIPT,
    FIXES_OF_TASK,
    Cause,
    Row,
    Setup,
    Verification,
    sentences,
)
from lockstep.train.settings import Settings

FIRST = Difference("gradient", 1, "0.weight", (1,), 0.25, "off by 2.5e-01 of its size")
WORST = {"loss": 0.0, "gradient": 0.25}


def verification(*findings, same=False, explained=True, first=FIRST, repeatable=True, why_single="", steps=(0, 1, 5)):
    kind, tolerance = ("fp32", SINGLE) if why_single else ("float64", DOUBLE)
    comparison = TraceComparison(() if first is None else (first,), WORST)
    rows = (Row("all of the below", "one process, ranks", "differ", False),)
    return Verification(
        Setup("task.py", 2, steps, kind, tolerance, seed=0),
        same,
        comparison,
        repeatable,
        findings,
        () if same else rows,
        explained,
        why_single,
    )


def finding(cause, tried=""):
    found = Findings(Subject("task.py", Settings(), 2, 3))
    found.add(cause, "It was measured.")
    return replace(found.diagnoses[0], tried=tried)


def test_the_same_run_is_one_sentence():
    assert sentences(verification(same=True, first=None)) == [
        "The same training run: 2 ranks train as one process does, over steps 0 to 1 and 5, the epoch's last "
        "(float64, to 1e-08 of each tensor's size)."
    ]


def test_fp32_and_consecutive_steps_are_said():
    (sentence,) = sentences(verification(same=True, first=None, why_single="RuntimeError: no", steps=(0, 1, 2)))
    assert sentence.endswith("over steps 0 to 2 (fp32, to 1e-03 of each tensor's size).")


def test_what_differs_by_design_is_a_verdict_of_its_own():
    found = verification(finding(Cause.RANDOM), finding(Cause.BATCHNORM))
    found = replace(found, apart_from=("dropout masks", "batch norm statistics"))
    assert not found.same
    assert found.verdict == sentences(found)[0] == json.loads(found.to_json())["verdict"][0]
    assert found.verdict == (
        "The same training run, apart from dropout masks and batch norm statistics: without them, 2 ranks train as one "
        "process does, over steps 0 to 1 and 5, the epoch's last (float64, to 1e-08 of each tensor's size)."
    )
    assert json.loads(found.to_json())["apart_from"] == ["dropout masks", "batch norm statistics"]
    assert repr(found).startswith("The same training run, apart from dropout masks")
    assert "<pre>The same training run, apart from dropout masks" in found._repr_html_()
    assert sentences(found)[1:3] == [
        "Cause 1 of 2: random state. It was measured.",
        "Fix: Train with --reproducible 2: each part of the batch then has random numbers of its own.",
    ]


def test_a_fault_is_named_with_its_fix():
    assert sentences(verification(finding(Cause.BATCHNORM, "Tried: it helps."))) == [
        "Not the same training run: 2 ranks differ from one process, first in the gradient 0.weight at step 1 on rank "
        "1 (off by 2.5e-01 of its size).",
        "Cause: BatchNorm statistics. It was measured.",
        "Fix: Use lockstep.SyncBatchNorm.convert_sync_batchnorm(model) in Task.model, or train with --reproducible 2, "
        "or use a norm that treats each sample separately, such as GroupNorm. Tried: it helps.",
    ]


def test_several_faults_are_counted_and_what_is_left_is_said():
    found = sentences(verification(finding(Cause.DATA), finding(Cause.RATES), explained=False))
    assert [sentence.partition(":")[0] for sentence in found[1:-1]] == ["Cause 1 of 2", "Fix", "Cause 2 of 2", "Fix"]
    assert found[-1] == "There may be more causes: run verify again after fixing these."


def test_without_a_cause_it_says_what_was_ruled_out():
    assert sentences(verification(explained=False))[1:] == [
        "No cause was found: turning off each of the features below did not make the runs the same. "
        "Check how the first tensor that differs is computed, and whether that can depend on the rank."
    ]


CHECK = "Check how the first tensor that differs is computed, and whether that can depend on the rank."


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ((), "one process and 2 ranks were compared with no feature turned off."),
        (
            (Row("nothing else", "", "the same", True), Row.failed("random", "", "OSError: no")),
            "one process and 2 ranks were compared with no feature turned off.",
        ),
        ((Row("random", "", "the same", True),), "although some of the experiments below give the same run."),
    ],
)
def test_nothing_is_said_of_features_that_were_not_turned_off(rows, sentence):
    (_, paragraph, *rest) = sentences(replace(verification(explained=False), rows=rows))
    assert paragraph.removeprefix("No cause was found").lstrip(":, ") == f"{sentence} {CHECK}"
    assert rest == ["1 of 2 experiments failed, and exclude no cause: OSError: no"] * (len(rows) == 2)


def test_ranks_that_make_no_update_are_not_compared():
    found = replace(verification(), comparison=None, rows=())
    assert sentences(found) == [
        "Not the same training run: the 2 ranks cannot train together.",
        "Nothing was compared, as not all ranks have made an update. Make it train with: lockstep run --devices 2 "
        "task.py",
    ]


def test_a_script_has_the_precision_and_the_tolerance_that_were_used():
    setup = Setup("train.py", 2, (0, 1, 2), "bf16 autocast", HALF, engine="none")
    found = replace(verification(same=True, first=None), setup=setup)
    assert sentences(found) == [
        "The same training run: 2 ranks train as one process does, over steps 0 to 2 (bf16 autocast, to 5e-02 of each "
        "tensor's size)."
    ]
    record = json.loads(found.to_json())["setup"]
    assert (record["seed"], record["engine"], record["precision"]) == (None, "none", "bf16 autocast")
    assert record["exactness"] == "bf16 autocast, to 5e-02 of each tensor's size"


def test_experiments_that_failed_exclude_nothing():
    failed = Row.failed("nothing", causes.PAIR, "TypeError: no")
    others = Row("all of the below", causes.RANKS_PAIR, "differ", False)
    last = "1 of 2 experiments failed, and exclude no cause: TypeError: no"
    found = replace(verification(explained=False), rows=(failed, others))
    assert sentences(found)[1:] == [
        "No cause was found: turning off each of the features below did not make the runs the same. "
        "Check how the first tensor that differs is computed, and whether that can depend on the rank.",
        last,
    ]
    found = replace(found, findings=(finding(Cause.SUM),))
    assert sentences(found)[-2:] == ["There may be more causes: run verify again after fixing these.", last]


def test_a_run_that_is_only_not_repeatable_is_told_apart():
    first, *_ = sentences(verification(finding(Cause.OPERATOR), first=None, repeatable=False))
    assert first == "Not reproducible: one process and 2 ranks agree, but no two runs are equal to the bit."


def test_every_cause_has_a_fix():
    assert FIXES_OF_TASK.keys() | FIXES_OF_SCRIPT.keys() == {*Cause} - {Cause.FAILED}  # its fix has the command
    for text in (*(finding(cause).fix for cause in FIXES_OF_TASK), *FIXES_OF_SCRIPT.values()):
        assert text.endswith(".")
        assert "{" not in text


def test_the_page_fits_and_begins_with_the_verdict():
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(found := verification(finding(Cause.SUM), why_single="TypeError: half"))
        lines = console.export_text().splitlines()
    assert str(found).splitlines() == lines
    assert "<pre>" in (html := found._repr_html_()) and "Cause: a loss that sums instead of averages." in html
    assert lines[0].startswith("Not the same training run:")
    assert "task.py: one process and 2 ranks, steps 0 to 1 and 5, the epoch's last" in lines
    assert max(map(len, lines)) <= 100
    assert [line.split() for line in lines if line.startswith(" losses")] == [["losses", "none"]]
    assert lines[-2:] == [
        "Computed in fp32, to 1e-03 of each tensor's size.",
        "Not computed in float64, because the task fails there: TypeError: half",
    ]


def test_the_json_holds_it_all():
    record = json.loads(verification(finding(Cause.SUM)).to_json())
    assert record["version"] == 1
    assert record["same"] is False
    assert record["setup"] == {
        "num_devices": 2,
        "engine": "ddp",
        "steps": [0, 1, 5],
        "seed": 0,
        "reproducible": None,
        "precision": "float64",
        "exactness": "float64, to 1e-08 of each tensor's size",
        "why_not_float64": None,
    }
    assert record["first_difference"] == {
        "kind": "gradient",
        "step": 1,
        "name": "0.weight",
        "ranks": [1],
        "size": 0.25,
        "words": "off by 2.5e-01 of its size",
    }
    assert record["causes"][0]["cause"] == "a loss that sums instead of averages"
    assert record["largest_differences"] == WORST
    assert len(record["verdict"]) == 3


def test_infinite_differences_are_null_in_json():
    sample = Difference("sample", 0, "batch", (), float("inf"), "3 of 8 samples are others")
    record = json.loads(verification(finding(Cause.DATA), first=sample).to_json())
    assert record["first_difference"]["size"] is None
