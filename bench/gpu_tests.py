"""Run tests/gpu in a limited time, for bench/gpu_proof.py: the most telling files first, each with a limit of its own.

A file is a process of its own; some run beside each other, as most tests wait for processes to start. A test that does
not end in time has failed: its stacks and those of the processes that it started are kept, and the tests behind it run
in a new process. What failed beside others runs once more, alone. What there is no time for is listed.

As a plugin of pytest (``-p bench.gpu_tests``) this module notes how each test ends, and watches its limit: that of
pytest-timeout leaves no time for the tests behind it, and it may be missing.
"""

import contextlib
import faulthandler
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import psutil

REPO = Path(__file__).parents[1]
ORDER = {
    "test_ranks_gpu.py": 0.6,
    "test_one_gpu.py": 0.5,
    "test_ddp.py": 0.3,
    "test_fit_gpu.py": 0.3,
    "test_reproducible_gpu.py": 0.3,
    "test_zero_gpu.py": 0.3,
    "test_ddp_weights.py": 0.3,
    "test_data_parallel.py": 0.3,
    "test_sync_batchnorm.py": 0.3,
    "test_world_gpu.py": 0.2,
    "test_checkpoint_gpu.py": 0.2,
}
"""Most telling first, with the part of the time that a file may take."""
LAST = "test_ddp_graph.py"  # a capture that fails can leave the device's libraries in disorder
OTHERS_PART = 0.2
BESIDE = 4
TEST_S = 90.0
"""A test at most, if its file has that much."""
END_S, LEAST_S, FAIR_S = 8.0, 3.0, 20.0
"""What the end of a file needs; less than this left, no test begins; and one that had less before the time of its file
was over has not failed: it could not be shown."""
START_S = 60.0
"""What a file may take until its tests are collected; its time begins then."""
STACKS_S = 5.0
"""How long processes that were aborted have to say where they were."""
OF_PYTEST = ("/pluggy/", "/_pytest/", "/pytest/", "<frozen runpy>", "/threading.py", "/gpu_tests.py")
BROKEN = ("failed", "error", "hung")
WATCH = "GPU_TESTS_WATCH"
"""The environment variable with the arguments of `Watch`."""
TEST_END = "GPU_TESTS_TEST_END"
"""That with the end of the test that runs, by the clock `time.time`."""
# A pytest older than ours, without its plugins, will do, and notices of the GPU's libraries are no failures.
OPTIONS = [
    *("-W", "ignore::pytest.PytestConfigWarning", "-o", "minversion=7", "-o", "filterwarnings=default"),
    *("-o", "addopts=--import-mode=importlib"),
]
Found = dict[str, Any]


def files_in_order(folder: Path) -> list[Path]:
    """Return the files with tests: those of `ORDER`, then the others, then the last one."""
    names = sorted(path.name for path in folder.glob("test_*.py"))
    known = [name for name in ORDER if name in names]
    others = [name for name in names if name not in ORDER and name != LAST]
    return [folder / name for name in (*known, *others, *([LAST] if LAST in names else []))]


class Job:
    """Tests of one file, or of several, in a process, for ``seconds`` but not beyond ``latest``."""

    def __init__(
        self, words: Sequence[str], seconds: float, latest: float, folder: Path, root: Path, test_s: float
    ) -> None:
        self.words, self.latest = list(words), latest
        self.notes = folder / f"{time.monotonic_ns()}.jsonl"
        self.end = min(time.time() + START_S, latest)
        self.killed = False
        options = ["-q", "--no-header", "-p", "no:cacheprovider", "-p", "bench.gpu_tests", "-m", "not soak", *OPTIONS]
        options += ["-c", str(REPO / "pyproject.toml"), f"--rootdir={root}"]
        command = [sys.executable, "-m", "pytest", *options, *words]
        watch = json.dumps([str(self.notes), seconds, latest, test_s])
        # Which plugins a machine has is chance.
        environ = {**os.environ, WATCH: watch, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        environ["PYTHONPATH"] = os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])
        self.log, self.stacks = self.notes.with_suffix(".log"), self.notes.with_suffix(".stacks")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=root, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def is_over(self) -> bool:
        """Return whether the process has ended; end it if it is far behind its limit, which it watches itself."""
        self.read()
        if self.process.poll() is None and time.time() > self.end + END_S:
            self.kill()
        return self.process.poll() is not None

    def kill(self) -> None:
        """End the process; what it has started ends with it."""
        if self.process.poll() is None:
            self.killed = True
            self.process.kill()
            self.process.wait()

    def read(self) -> tuple[list[str], dict[str, dict[str, Any]], str]:
        """Return the tests that were collected, how those that began ended, and the one that has not ended."""
        collected, ended, now = [], {}, ""
        whole = self.notes.read_text().rpartition("\n")[0] if self.notes.exists() else ""
        for note in map(json.loads, whole.splitlines()):
            collected += note.get("collected", [])
            self.end = note.get("end", self.end)
            if "began" in note:
                now = note["began"]
            elif "test" in note:
                ended[note["test"]] = note
                now = "" if now == note["test"] else now
        return collected, ended, now

    def result(self) -> tuple[list[str], dict[str, dict[str, Any]]]:
        """Return, when the process has ended, the tests that did not run and how the others ended."""
        collected, ended, now = self.read()
        status = "was ended" if self.killed else f"ended with exit status {self.process.returncode}"
        if now:
            stacks = without_pytest(self.stacks.read_text()) if self.stacks.exists() else ""
            text = f"its process {status}\n{tail(self.log.read_text(), 20)}\n{stacks}"
            ended[now] = {"test": now, "outcome": "hung" if self.killed or stacks else "failed", "text": text}
        elif self.killed and not collected and self.end == self.latest:
            return self.words, ended
        elif not collected and not ended and self.process.returncode != 5:  # 5: no tests
            if self.killed:
                status = f"had not collected the tests after {START_S:.0f} s"
            text = f"pytest {status}\n{self.log.read_text()}"
            ended[self.words[0]] = {"test": self.words[0], "outcome": "error", "text": text}
        return [test for test in collected if test not in ended], ended


def run(
    files: Sequence[Path],
    seconds: float,
    folder: Path,
    keep: Callable[[Found], None],
    *,
    beside: int = 1,
    root: Path = REPO,
    test_s: float = TEST_S,
) -> Found:
    """Run the tests in these files, and return what was found.

    Args:
        files: In the order in which they begin.
        seconds: For all together.
        folder: For notes and logs.
        keep: Called with what was found so far.
        beside: How many files run at once.
        root: The names of the tests begin there.
        test_s: For a test at most.
    """
    end = time.time() + seconds
    waiting = [([os.path.relpath(file, root)], ORDER.get(file.name, OTHERS_PART) * seconds) for file in files]
    running: list[Job] = []
    ended: dict[str, dict[str, Any]] = {}
    not_run: list[str] = []

    def found() -> Found:
        ends = dict(ended)
        left = [test + " (its time was too short)" for test in ended if ended[test]["outcome"] == "unfinished"]
        left += [*not_run, *(word for words, _ in waiting for word in words)]
        for job in running:
            collected, its, now = job.read()
            ends |= its
            left += [test + " (had not ended)" * (test == now) for test in collected if test not in its]
        problems = [f"{test} {note['outcome']}" for test, note in ends.items() if note["outcome"] in BROKEN]
        return {
            "problems": problems,
            "reasons": {test: tail(ends[test]["text"]) for test in ends if ends[test]["outcome"] in BROKEN},
            "counts": Counter(note["outcome"] for note in ends.values()),
            "skipped": [f"{test}: {note['text']}" for test, note in ends.items() if note["outcome"] == "skipped"],
            "left_out": left,
            "only_alone": [test for test, note in ends.items() if note.get("again")],
        }

    def run_waiting(beside: int) -> None:
        while waiting or running:
            while waiting and len(running) < beside and end - time.time() > END_S + LEAST_S:
                words, budget_s = waiting.pop(0)
                running.append(Job(words, budget_s, end - END_S, folder, root, test_s))
            for job in [job for job in running if job.is_over()]:
                running.remove(job)
                left, its = job.result()
                ended.update(its)
                for test, note in its.items():
                    print(f"{note['outcome']:<8}{test}", flush=True)
                    if note["outcome"] in BROKEN:
                        print(tail(note["text"]), flush=True)
                if left and len(left) < len(job.read()[0]) and (rest_s := job.end - time.time()) > END_S + LEAST_S:
                    waiting.insert(0, (left, rest_s))  # behind a test that ended the process
                else:
                    not_run.extend(left)
            if waiting and not running and end - time.time() <= END_S + LEAST_S:
                break
            keep(found())
            time.sleep(0.2)

    try:
        run_waiting(beside)
        again = [test for test, note in ended.items() if note["outcome"] in ("failed", "error") and "::" in test]
        if again and beside > 1 and not waiting:
            first = {test: ended[test] for test in again}
            waiting.append((again, end - time.time()))
            run_waiting(1)
            waiting.clear()
            for test, note in first.items():
                if ended[test]["outcome"] == "passed":
                    ended[test] = {**ended[test], "again": True}
                else:
                    ended[test] = note
            not_run[:] = [test for test in not_run if test not in first]
    finally:
        for job in running:
            job.kill()
        keep(found())
    return found()


def tail(text: str, lines: int = 60) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])


def without_pytest(stacks: str) -> str:
    lines = [line for line in stacks.splitlines() if not any(part in line for part in OF_PYTEST)]
    return "\n".join(lines[:40])


def abort_children(pid: int, number: int = signal.SIGABRT) -> None:
    """Send a signal to all that a process has started: at SIGABRT Python, and our ranks, write where they are."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.send_signal(number)


# --- the plugin of pytest


class Watch:
    """Notes how each test ends, and ends the process when one does not."""

    def __init__(self, notes: Path, seconds: float, latest: float, test_s: float) -> None:
        self.notes, self.seconds, self.latest, self.test_s, self.session = notes, seconds, latest, test_s, None
        self.end = latest
        self.stacks: TextIO = notes.with_suffix(".stacks").open("w+")
        self.is_done, self.is_hung = threading.Event(), False
        self.reports: list[Any] = []

    def _note(self, **fields: Any) -> None:
        with self.notes.open("a") as file:
            file.write(json.dumps(fields) + "\n")

    def pytest_collection_finish(self, session: Any) -> None:
        """Hook of pytest."""
        self.session = session
        self.end = min(time.time() + self.seconds, self.latest)
        self._note(collected=[item.nodeid for item in session.items], end=self.end)

    def pytest_collectreport(self, report: Any) -> None:
        """Hook of pytest."""
        if report.failed:
            self._note(test=report.nodeid, outcome="error", text=report.longreprtext)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Hook of pytest."""
        self._note(began=nodeid)
        self.reports, self.is_done = [], threading.Event()
        limit_s = max(min(self.test_s, self.end - time.time() - STACKS_S), 1.0)
        os.environ[TEST_END] = str(time.time() + limit_s)
        # Should the thread not get to run, because the test hangs in C and holds the interpreter's lock:
        faulthandler.dump_traceback_later(limit_s + 2 * STACKS_S, exit=True, file=self.stacks)
        threading.Thread(target=self.watch, args=(nodeid, limit_s, self.is_done), daemon=True).start()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Hook of pytest."""
        self.reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Hook of pytest."""
        self.is_done.set()
        if self.is_hung:  # `watch` ends the process
            time.sleep(2 * STACKS_S)
        faulthandler.cancel_dump_traceback_later()
        self._note(test=nodeid, **outcome(self.reports))
        if self.session is not None and self.end - time.time() < LEAST_S + STACKS_S:
            self.session.shouldstop = "the time of this file is over"

    def watch(self, test: str, limit_s: float, is_done: threading.Event) -> None:
        """End the process, with the stacks of all, if the test does not end in time."""
        if is_done.wait(limit_s):
            return
        self.is_hung = True
        faulthandler.dump_traceback(self.stacks, all_threads=True)
        abort_children(os.getpid())
        time.sleep(STACKS_S)
        self.stacks.seek(0)
        text = f"It did not end within {limit_s:.0f} s.\n{without_pytest(self.stacks.read())}"
        if any(report.failed for report in self.reports):  # its error says where the processes were that it started
            text += f"\n{tail(outcome(self.reports)['text'], 30)}"
        self._note(test=test, outcome="hung" if limit_s >= min(FAIR_S, self.test_s) else "unfinished", text=text)
        os._exit(1)


def outcome(reports: Sequence[Any]) -> dict[str, str]:
    """Return how a test ended, from the reports of its parts, and why."""
    for report in reports:
        if report.failed:
            text = "\n".join([report.longreprtext, *(f"{title}:\n{tail(text, 20)}" for title, text in report.sections)])
            return {"outcome": "failed" if report.when == "call" else "error", "text": text}
    for report in reports:
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            return {"outcome": "xfailed" if hasattr(report, "wasxfail") else "skipped", "text": str(reason)}
    return {"outcome": "passed", "text": ""}


def pytest_configure(config: Any) -> None:
    """Be a plugin: called by pytest."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    config.addinivalue_line("markers", "timeout(seconds): of pytest-timeout; here the limits are others")
    notes, *limits = json.loads(os.environ[WATCH])
    config.pluginmanager.register(Watch(Path(notes), *limits))
