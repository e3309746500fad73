"""In the cells of a notebook, run by a real kernel: what each shows, and that nothing is left running."""

import re
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
pytestmark = pytest.mark.filterwarnings("default")  # of what the notebook's client is made of

CELLS = [
    """
import dataclasses, os, pathlib, time, lockstep
from tests.training import make_task, mean_loss
task = make_task()
""",
    'result = lockstep.fit(task, devices=2, epochs=3, run_dir="run"); result',
    "lockstep.verify(task, devices=2, quiet=True)",
    'lockstep.compare(task, devices=2, strategies=["ddp"], rounds=2, steps=3, memory=False, quiet=True)',
    'lockstep.report("run")',
    'lockstep.fit(task, devices=2, strategy="none")',
    """
def wrong(model, batch):
    if os.environ["RANK"] == "1":
        raise KeyError("no such column")
    return mean_loss(model, batch)
lockstep.fit(dataclasses.replace(task, loss=wrong), devices=2)
""",
    """
def slow(model, batch):
    pathlib.Path("started-" + os.environ["RANK"]).touch()
    time.sleep(100)
lockstep.fit(dataclasses.replace(task, loss=slow), devices=2)
""",
    'lockstep.fit(task, devices=2, strategy="dp", steps=2).num_steps',
]


def interrupt_when(folder: Path, pid: int) -> None:
    """Do what the button does, as soon as both ranks are within the cell's loss."""
    while len(list(folder.glob("started-*"))) < 2:
        time.sleep(0.1)
    psutil.Process(pid).send_signal(signal.SIGINT)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_cells_show_tables_pictures_and_short_errors(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in CELLS])
    client = nbclient.NotebookClient(
        notebook, timeout=100, allow_errors=True, resources={"metadata": {"path": str(tmp_path)}}
    )
    seen = []
    with client.setup_kernel():
        kernel = psutil.Process(client.km.provisioner.pid)
        threading.Thread(target=interrupt_when, args=(tmp_path, kernel.pid), daemon=True).start()
        for number, cell in enumerate(notebook.cells):
            client.execute_cell(cell, number)
            assert kernel.children() == [], cell.source
            seen.append(cell.outputs)
    last = [outputs[-1] if outputs else {} for outputs in seen]
    assert last[1]["data"]["text/plain"].startswith("FitResult(first_step=0, num_steps=9, evaluations=[]")
    for number, begins in (
        (2, "The same training run: 2 ranks train as one process does"),
        (3, "task: 2 x cpu"),
    ):
        assert [each.output_type for each in seen[number]] == ["execute_result"], "shown once, and nothing else"
        assert last[number]["data"]["text/plain"].startswith(begins)
        assert begins.split("\n")[0] in last[number]["data"]["text/html"]
    assert last[4]["data"]["text/html"].startswith("<iframe srcdoc=")
    errors = ["\n".join(output["traceback"]) for output in last[5:8]]
    assert re.fullmatch(
        r"  Cell In\[6\], line 1, in <module>\n    lockstep\.fit\(.*\)\n"
        r"\nConfigurationError: strategy='none' is not allowed\.\nGive one of .*",
        errors[0],
    )
    failed = "\nRankFailed: Rank 1 failed: KeyError: 'no such column'\nIn step 1 (forward), at Cell In[7], line 3, on "
    assert failed in errors[1] and "\n  Cell In[7], line 3, in wrong\n" in errors[1] and "ipykernel_" not in errors[1]
    assert "supervise" not in errors[1]
    assert last[7]["ename"] == "KeyboardInterrupt"
    assert last[8]["data"]["text/plain"] == "2"
    assert not any("ipywidgets" in str(output) for output in seen[8])
