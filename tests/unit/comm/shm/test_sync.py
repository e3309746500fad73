import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[3] / "src" / "lockstep" / "comm" / "shm"
COMPILER = shutil.which("gcc") or shutil.which("clang")
RACE = "WARNING: ThreadSanitizer: data race"


def build(folder, sync):
    """Build the harness for ThreadSanitizer with ``sync`` as the text of _sync.c."""
    (folder / "_sync.c").write_text(sync)
    sources = [HERE / "sync_threads.c", folder / "_sync.c", SOURCES / "_collectives.c", SOURCES / "_reduce.c"]
    command = [COMPILER, "-std=gnu11", "-O1", "-g", "-fwrapv", "-fsanitize=thread", f"-I{SOURCES}", *sources]
    done = subprocess.run([*command, "-o", folder / "harness", "-lpthread"], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"cannot build for ThreadSanitizer: {done.stderr[-300:]}")
    return folder / "harness"


def run(harness, num_ranks, num_rounds, spins):
    command = [harness, str(num_ranks), str(num_rounds), str(spins)]
    # The first report is enough; each takes long to put into words.
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run on this kernel")
    return done


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
@pytest.mark.parametrize("num_rounds", [2, pytest.param(10, marks=pytest.mark.soak)])
def test_no_data_races_and_right_results(tmp_path, num_rounds):
    harness = build(tmp_path, (SOURCES / "_sync.c").read_text())
    for num_ranks, spins in ((2, 500), (3, 0)):
        done = run(harness, num_ranks, num_rounds, spins)
        assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


@pytest.mark.soak
@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
@pytest.mark.parametrize(
    ("ordered", "unordered"),
    [
        ("(&word->value, memory_order_acquire)", "(&word->value, memory_order_relaxed)"),
        ("atomic_store(&word->value, value)", "atomic_store_explicit(&word->value, value, memory_order_relaxed)"),
    ],
)
def test_the_check_notices_words_that_order_nothing(tmp_path, ordered, unordered):
    source = (SOURCES / "_sync.c").read_text()
    assert source.count(ordered) == 1
    done = run(build(tmp_path, source.replace(ordered, unordered)), 2, 5, 500)
    assert RACE in done.stderr
