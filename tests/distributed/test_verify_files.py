"""`lockstep verify SCRIPT.py` leaves a person's files as they are, and no run sees what another has written."""

import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest

from lockstep.errors import ConfigurationError, LockstepError
from lockstep.study.verify.script import sandbox
from lockstep.study.verify.script.runs import Runs
from lockstep.study.verify.script.verify_script import verify_script
from tests.script_verifier import Verifier

SCRIPTS = Path(__file__).parents[1] / "scripts" / "verify"

# Writes in all ways that are usual, in a folder with files that are there already; a second run would find the traces.
WRITES = """
import os, shutil, sqlite3, subprocess, sys, tempfile
from pathlib import Path
import numpy as np, torch

folder, number = Path(sys.argv[1]), sys.argv[2]
for place in (folder, Path.home(), Path(__file__).parent, Path("/tmp"), Path("/dev/shm")):
    assert not (place / f"new-{number}").exists(), place
    (place / f"new-{number}").write_text("new")
os.chdir(folder)
with open("log", "a") as file:
    file.write("more")
torch.save({"weights": torch.ones(1000)}, "best.pt")
torch.save({}, "new.pt")
np.save("array.npy", np.ones(3))
Path("moved.tmp").write_text("moved")
os.replace("moved.tmp", "moved")
os.remove("removed")
shutil.rmtree("tree")
Path("tree").mkdir()
os.chmod("log", 0o600)
os.utime("kept", (1, 1))
subprocess.run("rm kept; cp log 'copy of log'; ln -s log link", shell=True, check=True)
with sqlite3.connect("runs.db") as runs:
    runs.execute("insert into runs values (2)")
assert sorted(os.listdir()) == sorted(
    ["array.npy", "best.pt", "copy of log", "link", "log", "moved", f"new-{number}", "new.pt", "runs.db", "tree"]
), os.listdir()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def verifier():
    """The runs are forked off a process that has imported torch, as those of the command."""
    verifier = Verifier()
    yield verifier
    verifier.close()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the results of a longer run; its name has what paths and mount options must escape."""
    folder = tmp_path / "a, b:c\\d"
    (folder / "tree" / "branch").mkdir(parents=True)
    (folder / "tree" / "branch" / "leaf").write_text("leaf")
    for name in ("log", "best.pt", "array.npy", "moved", "removed", "kept"):
        (folder / name).write_text(name)
    subprocess.run(
        [sys.executable, "-c", "import sqlite3; sqlite3.connect('runs.db').execute('create table runs(a)')"],
        cwd=folder,
        check=True,
    )
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "writes.py").write_text(WRITES)
    return folder


def digest(folder):
    """Names, contents and times of all files below a folder."""
    paths = sorted(folder.rglob("*"))
    return [(str(p), p.lstat().st_mtime_ns, p.lstat().st_mode, p.is_file() and p.read_bytes()) for p in paths]


def in_child(action):
    """Run a function in a forked process, which may enter namespaces; return what it has failed with."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            action()
        except BaseException:
            os.write(writer, traceback.format_exc().encode()[-4000:])
        os._exit(0)
    os.close(writer)
    with open(reader) as sent:
        text = sent.read()
    os.waitpid(pid, 0)
    return text


def left_behind():
    return {*Path("/tmp").glob("new-*"), *Path("/dev/shm").glob("new-*")}


def runs(*command, **limits):
    return Runs([str(word) for word in command], 2, lambda _: None, **limits)


def test_files_stay_and_runs_do_not_see_those_of_others(verifier, tmp_path, folder):
    number = str(os.getpid())
    before = digest(tmp_path), left_behind()
    for (trace,), failure in verifier.run([tmp_path / "writes.py", folder, number], home=tmp_path / "home", times=2):
        assert not failure
        assert len(trace.steps) == 2
    assert (digest(tmp_path), left_behind()) == before


def test_a_script_that_resumes_keeps_its_weights(verifier, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("best.pt").write_text("weights of a longer run")
    before = digest(tmp_path)
    found, texts = verifier.verify([SCRIPTS / "saves_best.py", "best.pt"])
    assert found.same
    assert digest(tmp_path) == before
    assert texts[0] == "run 1 of at most 5: 1 rank"
    assert texts[1].startswith("run 2 of at most 5: 2 ranks (the first took ")


USER = sandbox._CLONE_NEWNS | sandbox._CLONE_NEWUSER


@pytest.mark.parametrize("namespaces", [(sandbox._CLONE_NEWNS, USER), (USER,)])
def test_overlays_with_and_without_privileges(tmp_path, folder, namespaces):
    scratch, before = tmp_path.parent / f"{tmp_path.name}-scratch", digest(tmp_path)
    scratch.mkdir()

    def write():
        sandbox.mount_overlays(scratch, namespaces)
        code = WRITES.partition("import numpy")[0] + WRITES[WRITES.index("folder, number") :].partition("model =")[0]
        code = "\n".join(line for line in code.splitlines() if not line.startswith(("torch.", "np.")))
        code = code.replace('"new.pt", ', "").replace("__file__", f"{str(folder)!r}").replace("assert sorted", "sorted")
        subprocess.run([sys.executable, "-c", code, str(folder), "1"], check=True)
        os.rename(folder / "new-1", folder / "again")
        assert sorted(os.listdir(tmp_path)) == ["a, b:c\\d", "home", "new-1", "writes.py"]
        assert not os.listdir(scratch)
        list(os.walk("/tmp", onerror=print))

    assert in_child(write) == ""
    sandbox.remove(scratch)
    assert not scratch.exists()
    assert digest(tmp_path) == before


def test_mounts_in_mounts_are_covered(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs to mount")
    scratch, outer = tmp_path / "scratch", tmp_path / "outer with blank"
    scratch.mkdir()
    outer.mkdir()

    def write():
        sandbox._call("unshare", sandbox._CLONE_NEWNS)
        sandbox._call("mount", None, "/", None, sandbox._MS_REC | sandbox._MS_PRIVATE, None)
        file = outer / "inner" / "file"
        sandbox._call("mount", "tmpfs", outer, "tmpfs", 0, None)
        (outer / "inner").mkdir()
        sandbox._call("mount", "tmpfs", outer / "inner", "tmpfs", 0, None)
        file.write_text("old")

        def overwrite():
            sandbox.mount_overlays(scratch)
            assert file.read_text() == "old"
            file.write_text("new")
            (outer / "other").write_text("new")

        assert in_child(overwrite) == ""
        assert file.read_text() == "old"
        assert os.listdir(outer) == ["inner"]

    assert in_child(write) == ""


def refuse(*_args):
    raise PermissionError("not here")


def test_without_overlays_writes_fail_and_the_switch_is_named(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(sandbox, "mount_overlays", refuse)
    before = digest(tmp_path)
    with pytest.raises(ConfigurationError) as caught:
        verify_script([str(tmp_path / "writes.py"), str(folder), "1"], report=lambda _: None)
    assert f"PermissionError: [Errno 13] Permission denied: '{folder / 'new-1'!s}'" in str(caught.value).replace(
        "\\\\", "\\"
    )
    assert "writes outside of TMPDIR are refused. To let the runs change files, pass --allow-writes" in str(
        caught.value
    )
    assert digest(tmp_path) == before


def test_landlock_refuses_all_kinds_of_writes(tmp_path, folder):
    scratch, before = tmp_path / "scratch", digest(folder)
    scratch.mkdir()

    def write():
        sandbox.refuse_writes(scratch)
        (scratch / "new").write_text("new")
        Path("/dev/null").write_text("new")
        changes = {
            "open": lambda: (folder / "log").write_text("new"),
            "make": lambda: (folder / "new").touch(),
            "mkdir": lambda: (folder / "new").mkdir(),
            "remove": lambda: (folder / "log").unlink(),
            "rename": lambda: os.replace(folder / "log", folder / "best.pt"),
            "link": lambda: os.symlink("log", folder / "link"),
            "out": lambda: os.replace(scratch / "new", folder / "new"),
            "truncate": lambda: os.truncate(folder / "log", 0),
        }
        for name, change in changes.items():
            try:
                change()
            except OSError:
                continue
            raise AssertionError(name)

    assert in_child(write) == ""
    assert digest(folder) == before


def test_without_any_protection_nothing_is_run(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(sandbox, "mount_overlays", refuse)
    monkeypatch.setattr(sandbox, "refuse_writes", refuse)
    before = digest(tmp_path)
    with pytest.raises(ConfigurationError) as caught:
        runs(tmp_path / "writes.py", folder, "1").run(1)
    assert str(caught.value) == (
        "verify cannot keep your files as they are while the script runs: the system permits neither overlay file "
        "systems (not here) nor Landlock (not here).\n"
        "To let the runs change files, pass --allow-writes in a copy of the folder."
    )
    assert digest(tmp_path) == before


def test_writes_can_be_allowed(tmp_path, monkeypatch):
    script = tmp_path / "one.py"
    script.write_text("import os; open('made', 'w').write(os.environ['WANDB_MODE'])")
    monkeypatch.chdir(tmp_path)
    runs(script, allow_writes=True).run(1)
    assert (tmp_path / "made").read_text() == "offline"


def test_a_limit_on_the_time_of_all_runs(tmp_path):
    script = tmp_path / "sleeps.py"
    script.write_text("import time; time.sleep(600)")
    with pytest.raises(ConfigurationError) as caught:
        verify_script([str(script)], minutes=0.02, report=lambda _: None)
    assert str(caught.value) == (
        "Stopped after 0.02 minutes (--minutes), before run 1 (1 rank) was done, and verify compares two.\n"
        "Give more minutes."
    )


@pytest.mark.parametrize(("cuts", "needed"), [(True, 2), (False, 3)])  # without cuts the first run has failed
def test_a_run_that_is_not_begun_in_time_is_missing(tmp_path, cuts, needed):
    script = runs(tmp_path / "none.py", minutes=1e-9)
    script.cuts = cuts
    for _ in range(needed):
        with pytest.raises(ConfigurationError, match="and verify compares two"):
            script.run(1)
    over = f"Stopped after 1e-09 minutes (--minutes): run {needed + 1} (2 ranks, random turned off) is missing."
    assert script.run(2, "random") == ([], over)


def test_a_run_whose_process_is_killed_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "protect", lambda _: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(LockstepError, match=r"The process of run 1 \(1 rank\) has ended with exit status -9"):
        runs(tmp_path / "none.py").run(1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_stays_behind_after_a_signal(tmp_path, number):
    script, marker = tmp_path / "sleeps.py", tmp_path / "marker"
    script.write_text(f"import time, os; os.system('touch {marker}'); time.sleep(600)")
    temporary = tmp_path / "t"
    temporary.mkdir()
    command = [sys.executable, "-m", "lockstep", "verify", str(script), "--devices", "2", "--allow-writes"]
    environ = {**os.environ, "TMPDIR": str(temporary)}
    process = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
    while not marker.exists():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    _, text = process.communicate(timeout=60)
    assert ("stopped by Ctrl-C" if number == signal.SIGINT else "Stopped by SIGTERM; all ranks have ended") in text
    assert not os.listdir(temporary)
    found = subprocess.run(["pgrep", "-f", str(script)], capture_output=True, text=True)
    assert not found.stdout
