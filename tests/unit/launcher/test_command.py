"""The command line of ``lockstep run``."""

import pytest

from lockstep.launcher.command import UsageError, _notes_on_script_flags, build_parser, parse_arguments


@pytest.mark.parametrize(
    ("line", "devices", "adopt", "script_args"),
    [
        ("s.py", None, False, []),
        ("s.py --devices 4 --adopt --lr 1", "4", True, ["--lr", "1"]),
        ("s.py --adopt --devices=4", "4", True, []),
        ("--devices 2 s.py --devices 3", "2", False, ["--devices", "3"]),
        ("s.py --devices 2 --devices 3", "2", False, ["--devices", "3"]),
        ("s.py --lr 1 --devices 4", None, False, ["--lr", "1", "--devices", "4"]),
        ("s.py --r=16 --log=2 --n 4 --s 1 --m=3", None, False, ["--r=16", "--log=2", "--n", "4", "--s", "1", "--m=3"]),
        ("s.py --adopt=1 --dev 3 -r 2 -t", None, False, ["--adopt=1", "--dev", "3", "-r", "2", "-t"]),
        ("--devices 2 s.py --log-dir=x --monitor d -h", "2", False, ["--log-dir=x", "--monitor", "d", "-h"]),
        ("--adopt s.py --adopt --dev=3", None, True, ["--adopt", "--dev=3"]),
        ("--nproc-per-node 2 s.py", "2", False, []),
        ("--nproc_per_node=2 s.py x", "2", False, ["x"]),
    ],
)
def test_what_is_ours_and_what_is_the_scripts(line, devices, adopt, script_args):
    found = parse_arguments(line.split())
    assert (found.nproc_per_node, found.adopt, found.training_script) == (devices, adopt, "s.py")
    assert found.training_script_args == script_args


def test_two_dashes_keep_the_rest_for_the_script():
    found = parse_arguments(["s.py", "--", "--adopt", "--devices", "2"])
    # Whether the dashes themselves reach the script depends on Python's argparse, as under torchrun.
    assert [arg for arg in found.training_script_args if arg != "--"] == ["--adopt", "--devices", "2"]
    assert (found.adopt, found.nproc_per_node) == (False, None)


def test_flags_of_torchrun_are_accepted_in_both_spellings():
    line = (
        "--nnodes 1:4 --node_rank=1 --rdzv-backend c10d --rdzv_endpoint h:1 --rdzv-id j --rdzv-conf timeout=5 "
        "--max-restarts 3 --monitor_interval 0.5 --master-addr h --master_port 5 --log-dir l -r 3 -t 1 --local-addr a "
        "--start-method fork --role r -m pkg.mod --devices 2 --epochs 3"
    )
    found = parse_arguments(line.split())
    assert (found.nnodes, found.node_rank, found.rdzv_backend, found.rdzv_endpoint) == ("1:4", 1, "c10d", "h:1")
    assert (found.max_restarts, found.monitor_interval, found.master_port, found.module) == (3, 0.5, 5, True)
    assert (found.redirects, found.tee, found.training_script) == ("3", "1", "pkg.mod")
    assert (found.nproc_per_node, found.training_script_args) == ("2", ["--epochs", "3"])


def test_the_environment_sets_defaults_as_for_torchrun(monkeypatch):
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    monkeypatch.setenv("PET_MASTER_PORT", "1234")
    assert (parse_arguments(["s.py"]).nproc_per_node, parse_arguments(["s.py"]).master_port) == ("3", 1234)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "the following arguments are required: SCRIPT"),
        ("--foo s.py", "unrecognized arguments: --foo"),
        ("--adpot s.py", "unrecognized arguments: --adpot\nDid you mean --adopt?"),
        ("--foo --max_restarts=3 --nodes 2 s.py", "unrecognized arguments: --foo --nodes\nDid you mean --nnodes?"),
        ("s.py --devices", "argument --devices: expected one argument"),
        ("--device 4 s.py", "unrecognized arguments: --device\nDid you mean --devices?"),
        ("--nproc=4 s.py", "unrecognized arguments: --nproc=4"),
        ("--node-rank one s.py", "argument --node-rank: invalid int value: 'one'"),
    ],
)
def test_nonsense(line, message):
    with pytest.raises(UsageError) as raised:
        parse_arguments(line.split())
    found = str(raised.value).removesuffix("\nTry 'lockstep run --help'.")
    assert found.removesuffix(", ...") == message  # Python 3.14 leaves that out


def test_help_teaches_and_names_every_flag_of_torchrun(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    text = build_parser().format_help()
    assert "lockstep run --nnodes 2 --node-rank 0 --master-addr host0 --master-port 29500 --devices 8 train.py" in text
    for action in build_parser()._actions:
        for flag in action.option_strings:
            assert flag in text
    assert "--nproc_per_node" not in text  # one spelling is enough to read


def test_a_flag_after_the_script_that_resembles_ours_is_noted_unless_the_script_has_it(tmp_path):
    (tmp_path / "s.py").write_text("parser.add_argument('--log_levels')\nparser.add_argument('--device')")
    line = [str(tmp_path / "s.py"), "--adpot", "--lr", "1", "--device=cpu", "--log-levels", "a", "--monitor", "--adpot"]
    assert _notes_on_script_flags(parse_arguments(line)) == [
        "s.py is given --adpot; did you mean `lockstep run --adopt s.py`?"
    ]
    assert _notes_on_script_flags(parse_arguments(["-m", "s", "--adpot"])) == []


def test_a_flag_after_the_script_that_both_have_is_ours_once_and_is_noted(tmp_path):
    (tmp_path / "s.py").write_text("parser.add_argument('--devices')")
    line = [str(tmp_path / "s.py"), "--devices", "2", "--adopt"]
    assert _notes_on_script_flags(parse_arguments(line)) == [
        "--devices after s.py, which has a flag of this name, is ours; the script gets it if ours is before SCRIPT"
    ]
    assert _notes_on_script_flags(parse_arguments(["--devices", "2", *line])) == []
