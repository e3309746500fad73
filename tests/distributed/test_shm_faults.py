"""What ranks on shm hear of one that dies, raises, leaves, stops, or calls something else."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.comm import collectives
from lockstep.comm.collectives import empty_buffer
from lockstep.errors import CollectiveError, ConfigurationError
from tests.shm import shm_group

DIED = "whose process has ended.\nIt was killed, or failed first: look at the output of rank 1."


def harm(*scenarios):
    """Run a round of each scenario in one process; return what the survivors report of each, by scenario."""
    before = sorted(os.listdir("/dev/shm"))
    command = [sys.executable, __file__, *scenarios]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    assert [entry["scenario"] for entry in rounds] == list(scenarios)
    new = {name for entry in rounds for name in entry["left"]} - set(before)
    deadline = time.monotonic() + 20
    while new & set(os.listdir("/dev/shm")) and time.monotonic() < deadline:
        time.sleep(0.05)  # loaders of other programs put files there, too, but not for long
    assert new & set(os.listdir("/dev/shm")) == set()
    return {name: [o for entry in rounds if entry["scenario"] == name for o in entry["outcomes"]] for name in scenarios}


@pytest.fixture(scope="module")
def harmed():
    return harm("kill", "kill", "kill", "raise", "async", "message", "leave", "stop")


def check_killed(outcomes):
    assert outcomes
    for outcome in outcomes:
        assert outcome["error"] == "CollectiveError"
        assert outcome["message"] == f"Rank {outcome['rank']} in all_reduce on shm waited for rank 1, {DIED}"
        assert outcome["after_s"] < LIMIT_S / 2  # by what has happened, not at the limit


@pytest.mark.parametrize("scenario", ["kill", "raise"])
def test_a_rank_that_dies_is_named_within_a_second(harmed, scenario):
    check_killed(harmed[scenario])


@pytest.mark.soak
def test_many_ranks_that_die_are_named_long_before_the_limit():
    check_killed(harm(*["kill"] * 20)["kill"])


def test_a_rank_that_dies_fails_futures_and_messages(harmed):
    for outcome in harmed["async"]:
        assert outcome["error"] == "RuntimeError"
        assert (
            f"CollectiveError: Rank {outcome['rank']} in all_reduce on shm waited for rank 1, {DIED}"
            in outcome["message"]
        )
        assert outcome["after_s"] < LIMIT_S / 2  # by what has happened, not at the limit
    for outcome in harmed["message"]:
        assert outcome["error"] == "CollectiveError"
        assert outcome["message"] == f"Rank {outcome['rank']} in recv from rank 1 waited for rank 1, {DIED}"
        assert outcome["after_s"] < LIMIT_S / 2  # by what has happened, not at the limit


def test_a_rank_that_leaves_or_stops(harmed):
    for outcome in harmed["leave"]:
        assert outcome["error"] == "CollectiveError"
        assert outcome["message"] == (
            f"Rank {outcome['rank']} in all_reduce on shm waited for rank 1, which has left the group.\n"
            "It destroyed its process group before this call; all ranks must call the same collectives."
        )
        assert outcome["after_s"] < LIMIT_S / 2  # by what has happened, not at the limit
    for outcome in harmed["stop"]:
        assert outcome["error"] == "CollectiveError"
        assert outcome["message"].startswith(
            f"Rank {outcome['rank']} in all_reduce on shm waited 2 s for rank 1.\nThat"
        )


def test_different_calls_are_told_apart_on_every_rank(ranks):
    def body(world):
        messages = []
        for calls in (
            (lambda g: dist.all_reduce(torch.ones(3), group=g), lambda g: dist.all_reduce(torch.ones(4), group=g)),
            (lambda g: dist.barrier(g), lambda g: dist.broadcast(torch.ones(1), 0, g)),
            (
                lambda g: dist.all_reduce(torch.ones(1), group=g),
                lambda g: dist.all_reduce(torch.ones(1).double(), dist.ReduceOp.MAX, group=g),
            ),
        ):
            try:
                with shm_group() as group:
                    calls[world.rank](group)
            except CollectiveError as error:
                messages.append(str(error).splitlines()[0])
            dist.barrier()
        return messages

    first, second = ranks(2)(body)
    pairs = [
        ("all_reduce", "all_reduce(sum) of 3 float32", "all_reduce(sum) of 4 float32"),
        ("barrier", "barrier", "broadcast of float32 from or to rank 0 of the group"),
        ("all_reduce", "all_reduce(sum) of 1 float32", "all_reduce(max) of 1 float64"),
    ]
    for here, there, (name, mine, theirs) in zip(first, second, pairs, strict=True):
        told = [
            f"Rank 0 in {name} on shm: the ranks call different collectives. This rank calls {mine}; rank 1 "
            f"calls {theirs}.",
            f"Rank 1 in {'broadcast' if name == 'barrier' else name} on shm: the ranks call different collectives. "
            f"This rank calls {theirs}; rank 0 calls {mine}.",
        ]
        assert [here, there] == told


def test_another_number_of_bytes(ranks):
    def body(world):
        try:
            with shm_group() as group:
                dist.broadcast(torch.ones(3 + world.rank), 0, group)
                dist.barrier(group)
        except CollectiveError as error:
            return type(error).__name__, str(error)

    first, second = ranks(2)(body)
    told = (
        "Rank 1 in broadcast on shm: rank 0 sends a number of bytes that does not match this rank's buffer.\n"
        "The tensors must have the same shapes and dtypes on all ranks."
    )
    assert second == ("CollectiveError", told)
    assert first == ("CollectiveError", f"Rank 0 in barrier on shm waited for rank 1, which gave up:\n{told}")


def test_after_a_failure_the_group_says_so_at_once(ranks):
    def body(world):
        with shm_group(timeout_s=0.3) as group:
            told = []
            for _ in range(2) if world.rank == 0 else ():
                start = time.monotonic()
                try:
                    dist.all_reduce(torch.ones(1), group=group)
                except CollectiveError as error:
                    told.append((str(error).splitlines()[0], time.monotonic() - start < 0.3))
            dist.barrier()
        return told

    line = "Rank 0 in all_reduce on shm waited 0.3 s for rank 1."
    assert ranks(2)(body)[0] == [(line, False), (line, True)]


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter"])
def test_a_reduction_that_times_out_in_the_thread_of_backward_names_its_parameters(ranks, name):
    """Rank 1 stops in the middle of a call, so rank 0 waits where it has begun the call, and for no future."""

    def body(world):
        with shm_group() as group:
            model = nn.Sequential(nn.Linear(300, 300, bias=False), nn.Linear(300, 300, bias=False))
            wrapped = lockstep.DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.1)
            if name == "reduce_scatter":
                lockstep.ZeroRedundancyOptimizer(
                    model.parameters(), torch.optim.SGD, process_group=group, shard_gradients=True, lr=0.1
                )
            wrapped(torch.ones(1, 300)).sum().backward()  # after the first step, buckets leave during backward
            have_all_begun = group.comm.have_all_begun
            if world.rank == 0:
                group.comm.have_all_begun = lambda operation, _: have_all_begun(operation, 20.0)
                group.comm.timeout_s = 0.3
            else:
                group.comm.have_all_begun = lambda *_: time.sleep(0.6) or True
            dist.barrier()
            try:
                wrapped(torch.ones(1, 300)).sum().backward()
            except CollectiveError as error:
                message = str(error)
            dist.barrier()
        return message

    first, second = ranks(2)(body)
    told = "Rank 0: the gradient reduction of bucket 0 (1.weight ... 1.weight) failed: Rank 0 in"
    assert first.startswith(f"{told} {name} on shm waited 0.3 s for rank 1.\n")
    # Rank 0 had reduced its part before it gave up, so rank 1 fails in its next call.
    told = f"Rank 1: the gradient reduction of bucket 1 (0.weight ... 0.weight) failed: Rank 1 in {name}"
    assert second.startswith(f"{told} on shm waited for rank 0, which gave up:\n")


def test_a_signal_interrupts_the_wait_and_the_others_hear_of_it(ranks):
    def body(world):
        def ring(number, frame):
            raise KeyboardInterrupt

        try:
            with shm_group() as group:
                if world.rank == 0:
                    previous = signal.signal(signal.SIGALRM, ring)
                    signal.setitimer(signal.ITIMER_REAL, 0.1)
                    start = time.monotonic()
                    try:
                        dist.all_reduce(torch.ones(1), group=group)
                    except KeyboardInterrupt:
                        return time.monotonic() - start < 1.0
                    finally:
                        signal.signal(signal.SIGALRM, previous)
                        dist.distributed_c10d._get_default_store().set("interrupted", "")
                dist.distributed_c10d._get_default_store().wait(["interrupted"])
                for _ in range(2):  # rank 0 has given its part of the first
                    dist.all_reduce(torch.ones(1), group=group)
        except CollectiveError as error:
            return str(error)

    assert ranks(2)(body) == [
        True,
        "Rank 1 in all_reduce on shm waited for rank 0, which gave up:\nRank 0 was interrupted in all_reduce on shm.",
    ]


def test_wrong_arguments_are_told_before_anything_is_sent(ranks):
    def body(world):
        told = []
        with shm_group() as group:
            for call in (
                lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG, group=group),
                lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND, group=group),
                lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn), group=group),
                lambda: group.all_gather_single(torch.ones(3), torch.ones(2)).wait(),
                lambda: dist.all_reduce(torch.ones(2, device="meta"), group=group),
            ):
                try:
                    call()
                except ValueError as error:
                    told.append(str(error))
            fine = torch.ones(2)
            dist.all_reduce(fine, group=group)
        try:
            dist.all_reduce(fine, group=group)
        except (ValueError, RuntimeError) as error:
            told.append(type(error).__name__)
        return told, fine.tolist()

    told, fine = ranks(2)(body)[0]
    assert told[:5] == [
        "The backend shm has no ReduceOp.AVG for torch.bool.\nIt has: SUM, PRODUCT, BAND, BOR, MIN, MAX, BXOR.",
        "The backend shm has no ReduceOp.BAND for torch.float32.\nIt has: SUM, AVG, PRODUCT, MIN, MAX.",
        "The backend shm cannot reduce torch.float8_e4m3fn tensors, only move them.\nConvert them before the call.",
        "Rank 0 in all_gather_single: invalid tensor size: invalid size of output tensor at index 0 (3, not 4).\n"
        "Nothing was sent; the group stays usable.",
        "Rank 0 in allreduce: shm moves only CPU tensors; use init_process_group('cpu:gloo,meta:...').\n"
        "Nothing was sent; the group stays usable.",
    ]
    assert fine == [2.0, 2.0]


def test_what_one_rank_can_refuse_does_not_lose_the_group(ranks):
    def body(world):
        one, two, double = torch.ones(1), torch.ones(2), torch.ones(1, dtype=torch.float64)
        wrong = [
            lambda pg: dist.broadcast(one, group_src=2, group=pg),
            lambda pg: dist.broadcast(one, group_src=-1, group=pg),
            lambda pg: dist.reduce(one, group_dst=2, group=pg),
            lambda pg: dist.gather(one, None, group_dst=2, group=pg),
            lambda pg: dist.scatter(one, None, group_src=2, group=pg),
            lambda pg: pg.broadcast([]),
            lambda pg: pg.broadcast([one, two]),
            lambda pg: pg.allreduce([one, double]),
            lambda pg: pg.allreduce([two.to_sparse()], dist.ReduceOp.MAX),
            lambda pg: pg.allreduce_coalesced([]),
            lambda pg: pg.allreduce_coalesced([one, one.to_sparse()]),
            lambda pg: pg.reduce([one, one]),
            lambda pg: pg.allgather([[one, two]], [one]),
            lambda pg: pg.allgather([[one]], [one]),
            lambda pg: pg.allgather([[double, double]], [one]),
            lambda pg: pg.allgather([[one, torch.ones(1, device="meta")]], [one]),
            lambda pg: pg.allgather_coalesced([[one], [two]], [one]),
            lambda pg: pg.gather([[one], [one]], [one], root=world.rank),
            lambda pg: pg.scatter([one], [[one, one]], root=1 - world.rank),
            lambda pg: pg.scatter(one, [one, two], root=world.rank),
            lambda pg: pg.reduce_scatter(two, [one, one]),
            lambda pg: pg.alltoall([one], [one]),
            lambda pg: pg._allgather_base(one, one),
            lambda pg: pg._reduce_scatter_base(double, two),
            lambda pg: pg.reduce_scatter_tensor_coalesced([one, double], [two, two]),
            lambda pg: pg.allgather_into_tensor_coalesced([two], [one, one]),
            lambda pg: pg.alltoall_base(one, double, [], []),
            lambda pg: pg.gather([[one, one]], [one], root=1 - world.rank),
            lambda pg: pg.gather([], [torch.ones(1, device="meta")], root=1 - world.rank),
            lambda pg: pg.send([one], 2, 0),
            lambda pg: pg.recv([one], -3, 0),
        ]
        answers = []
        with shm_group() as group:
            for call in wrong:
                with pytest.raises(ConfigurationError) as caught:
                    call(group)
                answers.append(str(caught.value))
            with pytest.raises(TypeError):
                group.broadcast(one, root=0, other=1)
            fine = torch.ones(1)
            dist.all_reduce(fine, group=group)
        for call in (
            lambda: collectives.broadcast(one, group=dist.group.WORLD, src=2),
            lambda: collectives.broadcast_object(1, group=dist.group.WORLD, src=-1),
            lambda: collectives.gather_states({}, group=dist.group.WORLD, device=torch.device("cpu"), to=2),
        ):
            with pytest.raises(ConfigurationError, match="invalid root rank"):
                call()
        return answers[:2], all(each.endswith("the group stays usable.") for each in answers), fine.item()

    first, is_usable, fine = ranks(2, warnings="ignore")(body)[0]
    assert first == [
        f"Rank 0 in broadcast: invalid root rank or peer {root}: this group has ranks 0 to 1.\n"
        "Nothing was sent; the group stays usable."
        for root in (2, -1)
    ]
    assert is_usable and fine == 2.0


def test_a_wait_ends_when_its_own_time_is_up(ranks):
    def body(world):
        with shm_group() as group:
            time.sleep(2.0 * world.rank)
            works = [dist.all_reduce(torch.ones(1), group=group, async_op=True) for _ in range(3)]
            began, message = time.monotonic(), ""
            try:
                if world.rank == 0:
                    works[2].wait(timedelta(seconds=0.4))
            except CollectiveError as error:
                message = str(error)
            waited_s = time.monotonic() - began
            for work in works:  # they go on
                work.wait()
            return message, waited_s

    message, waited_s = ranks(2)(body)[0]
    assert message == "all_reduce on shm has not ended within 0.4 s.\nAnother rank may be late."
    assert 0.4 <= waited_s < 10


def test_a_broadcast_of_another_dtype_is_an_error(ranks):
    def body(world):
        try:
            with shm_group() as group:
                tensor = torch.ones(3, dtype=(torch.int32, torch.float32)[world.rank])
                dist.broadcast(tensor, 0, group)
        except CollectiveError as error:
            return str(error).splitlines()[0]

    calls = [f"broadcast of {dtype} from or to rank 0 of the group" for dtype in ("int32", "float32")]
    assert ranks(2)(body) == [
        f"Rank {rank} in broadcast on shm: the ranks call different collectives. "
        f"This rank calls {calls[rank]}; rank {1 - rank} calls {calls[1 - rank]}."
        for rank in range(2)
    ]


def test_the_buffers_of_a_forward_on_one_rank(ranks):
    def body(world):
        try:
            with shm_group() as group:
                if world.rank == 0:
                    dist.broadcast(torch.ones(3, dtype=torch.uint8), 0, group)
                dist.barrier(group)
        except CollectiveError as error:
            return str(error).splitlines()[-1]

    assert (
        ranks(2)(body)
        == [
            "This broadcast of uint8 may be that of a model's buffers, which begins a forward of its wrapper: "
            "for a forward on one rank, call model.module."
        ]
        * 2
    )


# --- Ranks that come to harm inside a collective: this file as a script, with a scenario for each round ---------------

# Each round forks ranks from this process, which has torch loaded already, and harms one of them. Prints one JSON line
# a round: what each of the others raised, how long after the harm, and what is left.
NUM_RANKS, VICTIM = 3, 1
TIMEOUT_S = {"stop": 2.0}
LIMIT_S = 30.0


def join(folder, rank, timeout_s):
    store = dist.FileStore(f"{folder}/store", NUM_RANKS)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("shm", store=store, rank=rank, world_size=NUM_RANKS, timeout=timeout)


def work(scenario, folder, rank, index):
    """Reduce until something happens."""
    join(folder, rank, TIMEOUT_S.get(scenario, LIMIT_S))
    sizes = [1, 5000, 1_000_000]
    tensor = torch.ones(sizes[index % 3])
    if index // 3 % 2:  # reduced where it lies
        tensor = empty_buffer(
            sizes[index % 3], dtype=torch.float32, device=torch.device("cpu"), group=dist.group.WORLD
        ).fill_(1.0)
    Path(f"{folder}/ready{rank}").touch()
    while True:
        if scenario == "raise" and rank == VICTIM and Path(f"{folder}/harm").exists():
            raise ValueError("a bug in the training script")
        if scenario == "leave" and rank == VICTIM and Path(f"{folder}/harm").exists():
            dist.destroy_process_group()
            time.sleep(60)
        if scenario == "message" and rank != VICTIM:
            dist.recv(tensor, VICTIM)
        elif scenario == "message":
            time.sleep(60)
        elif scenario == "async":
            dist.all_reduce(tensor, async_op=True).get_future().wait()
        else:
            dist.all_reduce(tensor)


def child(scenario, folder, rank, index):
    outcome = {"rank": rank}
    try:
        work(scenario, folder, rank, index)
    except BaseException as error:
        outcome |= {"error": type(error).__name__, "message": str(error), "at": time.monotonic()}
    Path(f"{folder}/outcome{rank}.tmp").write_text(json.dumps(outcome))
    Path(f"{folder}/outcome{rank}.tmp").rename(f"{folder}/outcome{rank}")
    # The hard way, as when another thread still runs: nothing is closed in order.
    os._exit(0)


def one_round(scenario, index):
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(NUM_RANKS):
            pid = os.fork()
            if pid == 0:
                child(scenario, folder, rank, index)
            pids.append(pid)
        try:
            harmed_at = do_harm(scenario, folder, pids[VICTIM])
            survivors = [rank for rank in range(NUM_RANKS) if rank != VICTIM]
            outcomes = [json.loads(await_file(f"{folder}/outcome{rank}").read_text()) for rank in survivors]
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    for outcome in outcomes:
        outcome["after_s"] = outcome.pop("at") - harmed_at
    return {"outcomes": outcomes, "left": sorted(os.listdir("/dev/shm"))}


def await_file(name):
    deadline = time.monotonic() + 20
    while not Path(name).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(name)
        time.sleep(0.001)
    return Path(name)


def do_harm(scenario, folder, pid):
    for rank in range(NUM_RANKS):
        await_file(f"{folder}/ready{rank}")
    time.sleep(random.uniform(0.0, 0.03))
    now = time.monotonic()
    if scenario in ("kill", "async", "message"):
        os.kill(pid, signal.SIGKILL)
    elif scenario == "stop":
        os.kill(pid, signal.SIGSTOP)
    else:
        Path(f"{folder}/harm").touch()
    return now


if __name__ == "__main__":
    torch.set_num_threads(1)
    for number, name in enumerate(sys.argv[1:]):
        print(json.dumps({"scenario": name, **one_round(name, number)}), flush=True)
