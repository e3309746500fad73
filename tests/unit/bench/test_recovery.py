"""What bench/recovery.py makes of the lines that the ranks have logged."""

from bench import recovery
from bench.recovery import cost_of_death, files_of, missing, print_parts, progress_of, steps_done_again
from bench.recovery_jobs import Event, whole_steps

# Two ranks; rank 1 is killed at 3.1 s in step 3. Rank 0 does step 3 alone at 4.1 s, and 4 with a new rank 1 at 6 s.
LINES = """\
1.0 done 0 10 1 0.5
1.1 done 1 11 1 0.5
2.0 begin 0 10 2 0.0
2.0 done 0 10 2 0.5
2.1 done 1 11 2 0.5
3.0 begin 0 10 3 0.0
4.0 begin 0 10 3 0.0
4.1 done 0 10 3 0.5
6.0 done 0 10 4 0.5
6.2 done 1 12 4 0.5
"""
EVENTS = [Event.of(line) for line in LINES.splitlines()]


def test_a_step_is_whole_when_all_parts_of_its_batch_are_done():
    assert whole_steps(EVENTS) == {1: 1.1, 2: 2.1, 4: 6.2}


def test_the_cost_of_a_death():
    seconds, stood_s, repeated = cost_of_death(EVENTS, 1, 3.1)
    assert (round(seconds, 6), round(stood_s, 6), repeated) == (3.1, 2.1, 0)
    assert cost_of_death(EVENTS[:-1], 1, 3.1) is None
    again = [*EVENTS[:7], *(Event.of(f"5.0 done {rank} 9 {step} 0.5") for step in (2, 3) for rank in (0, 1))]
    assert cost_of_death(again, 1, 3.1) == (5.0 - 3.1, 3.0, 1)


def test_steps_that_were_done_in_vain():
    found = [Event.of(f"1.0 {what} 0 10 {step} 0.0") for what, step in [("begin", 1), ("begin", 1), ("done", 1)]]
    assert steps_done_again(found) == (1, 0)
    assert steps_done_again([*found, found[-1]]) == (0, 1)


def test_what_was_done_of_what_was_possible():
    # Steps take a second between failures; step 3 was done with half of its samples.
    found = progress_of(EVENTS, 10.0)
    assert (round(found["pace_s"], 6), round(found["steps"], 6), round(found["samples"], 6)) == (1.0, 0.4, 0.35)


def test_files_of_other_programs_are_not_counted():
    paths = ["/dev/shm/torch_41_2090_0", "/dev/shm/torch_410_7_1", "/dev/shm/psm_ab12", "/dev/shm/sem.41"]
    assert files_of({41, 42}, paths) == ["/dev/shm/sem.41", "/dev/shm/torch_41_2090_0"]


def test_a_missing_library_is_told(monkeypatch):
    assert missing() is None
    monkeypatch.setattr(recovery, "library", lambda: "it was not built")
    assert missing() == "it was not built"


def test_what_the_seconds_of_torchft_are_made_of(capsys):
    print_parts([[(4.5, 1.0, 0), (4.7, 1.1, 0)], [(4.9, 1.06, 0)]], [1.9, 2.1, 2.0])
    row, note = capsys.readouterr().out.splitlines()
    assert " ".join(row.split()) == (
        "import torch, torchft 3 2.00 (1.90 to 2.10) of torchft's seconds: a new interpreter"
    )
    assert note == "  torchft's others go on after 1.06 s, with their part of the batch until the new one is back"
    print_parts([], [1.9])
    assert capsys.readouterr().out == ""
