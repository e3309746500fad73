"""Steps under torch.profiler: a trace for each rank, with the phases of the report in it, one inside the other."""

import json
import re

import pytest

import lockstep
from lockstep.errors import ConfigurationError
from lockstep.telemetry import ranges
from lockstep.telemetry.record import read_run
from tests.training import make_task, mean_loss


def spans_of(path):
    """Return the named ranges of a trace: name, thread, begin and end in microseconds."""
    entries = json.loads(path.read_text())["traceEvents"]
    found = [each for each in entries if each.get("ph") == "X" and each.get("cat") == "user_annotation"]
    return sorted((each["ts"], each["ts"] + each["dur"], each["name"], each["tid"]) for each in found)


def parent_of(span, spans):
    """Return the name of the shortest range of the same thread around one."""
    begin, end, _, thread = span
    around = [each for each in spans if each is not span and each[3] == thread and each[0] <= begin and end <= each[1]]
    return min(around, key=lambda each: each[1] - each[0])[2] if around else None


def test_each_rank_writes_a_trace_in_which_phases_hold_what_happens_in_them(ranks, tmp_path):
    def train(world):
        result = lockstep.fit(
            make_task(),
            steps=8,
            quiet=True,
            accumulate=2,
            bucket_cap_mb=1e-4,
            run_dir=tmp_path,
            profile=True,
            profile_steps=(4, 2),
        )
        return result.losses, ranges.now

    found = ranks(2)(train)
    assert [now for _, now in found] == [False, False]
    names = [f"rank-{rank}.steps-{steps}.pt.trace.json" for rank in (0, 1) for steps in ("4-5",)]
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == names
    for rank in (0, 1):
        spans = spans_of(tmp_path / "profile" / f"rank-{rank}.steps-4-5.pt.trace.json")
        inside = {(span[2], parent_of(span, spans)) for span in spans}
        for step in ("step 4", "step 5"):
            assert (step, None) in inside
            for phase in ("data_wait", "forward", "backward", "communication", "optimizer"):
                assert (phase, step) in inside
        assert ("exchange/bucket 0", "backward") in inside
        assert ("exchange/bucket 1", "backward") in inside
        waits = [where for name, where in inside if re.fullmatch(r"exchange/bucket \d wait", name)]
        assert waits
        assert all(where == "backward" or re.fullmatch(r"exchange/bucket \d", where) for where in waits)
        count = {name: sum(span[2] == name for span in spans) for _, _, name, _ in spans}
        assert (count["forward"], count["backward"], count["communication"], count["optimizer"]) == (4, 4, 2, 2)
        assert count["exchange/bucket 0"] == 2  # once a step, in backward of its last micro-batch
    told = [event for event in read_run(tmp_path).events if event.event == "profile"]
    assert [event.text.split(":")[0] for event in told] == ["steps 4 to 5 profiled"]
    assert all(event.seconds > 0 for event in told)

    def plain(world):
        return lockstep.fit(make_task(), steps=8, quiet=True, accumulate=2, bucket_cap_mb=1e-4).losses

    assert ranks(2)(plain) == [losses for losses, _ in found]


def test_replicas_have_their_phases_in_their_own_threads(ranks, tmp_path):
    def train(world):
        lockstep.fit(
            make_task(), strategy="dp", devices=2, steps=6, quiet=True, profile=True, profile_dir=tmp_path / "traces"
        )

    ranks(1)(train)
    spans = spans_of(tmp_path / "traces" / "rank-0.steps-4-6.pt.trace.json")
    threads = {name: {span[3] for span in spans if span[2] == name} for name in ("replicas", "forward", "backward")}
    assert len(threads["replicas"]) == 1
    assert len(threads["backward"]) == 2


def test_a_run_that_is_over_too_soon_says_so_and_one_cut_short_writes_what_there_is(ranks, tmp_path):
    def train(world, num_steps, profile_steps):
        settings = {"profile": True, "profile_steps": profile_steps, "run_dir": tmp_path, "quiet": True}
        lockstep.fit(make_task(), steps=num_steps, **settings)
        return [event.text for event in read_run(tmp_path).events if event.event in ("remark", "profile")]

    (text,) = ranks(1)(train, 3, (9, 1))[0]
    assert text == "no step was profiled: profiling begins at step 9 of this start, which had 3"
    (text,) = ranks(1)(train, 5, (4, 9))[0]
    assert text.startswith("steps 4 to 5 profiled: ")
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["rank-0.steps-4-5.pt.trace.json"]


@pytest.mark.flaky(
    "when torch's profiler stops, it frees records into which threads of Gloo write the end of calls under way; a rank "
    "that fails cannot wait for these, so it may crash"
)
def test_an_error_within_a_profiled_step_ends_the_profiler(ranks, tmp_path):
    def train(world, steps):
        calls = []

        def loss(model, batch):
            calls.append(batch)
            if len(calls) == 5 and world.rank == 1:
                raise RuntimeError("on purpose")
            return mean_loss(model, batch)

        task, settings = make_task(loss=loss), {"profile": True, "profile_dir": tmp_path, "quiet": True}
        lockstep.fit(task, steps=steps, profile_steps=(4, 9) if steps > 5 else None, **settings)
        return ranges.now

    assert str(ranks(2).each(train, 9, timeout=30.0)[1].error) == "on purpose"
    assert ranks(2)(train, 3) == [False, False]  # and the profiler begins again
    names = [path.name for path in sorted(tmp_path.iterdir())]
    assert names == [f"rank-{rank}.steps-1-3.pt.trace.json" for rank in (0, 1)]


def test_a_folder_that_a_rank_cannot_write_to_is_an_error_on_all(ranks, tmp_path):
    (tmp_path / "file").write_text("")

    def train(world):
        folder = tmp_path / "file" / "traces" if world.rank else tmp_path
        with pytest.raises(ConfigurationError) as error:
            lockstep.fit(make_task(), steps=3, quiet=True, profile=True, profile_dir=folder)
        return str(error.value)

    text = f"Rank 1: Cannot write traces to {tmp_path}/file/traces: Not a directory.\n"
    assert ranks(2)(train) == [f"{text}Name another folder with profile_dir=DIR (--profile-dir DIR)."] * 2
