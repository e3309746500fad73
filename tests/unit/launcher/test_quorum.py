"""Which machines form the next generation, from what each of them says."""

import types

import pytest
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousGracefulExitError

from lockstep.base import rank_files
from lockstep.comm.rendezvous import poll_until
from lockstep.errors import ConfigurationError, LockstepError
from lockstep.launcher import quorum
from lockstep.launcher.quorum import Lighthouse, Machines, Member, check_lighthouse, digest, next_generation

TWO = digest(["a", "b"])


def member(name, number, of, place=None, *, most=8, is_broken=False, is_done=False):
    return Member(name, "host:1", number, 2, of, place, most, "host", is_broken, is_done)


def agreed_by(found):
    """Return the number of the next generation, and its machines."""
    agreed = next_generation(found)
    return None if agreed is None else (agreed[0], [each.name for each in agreed[1]])


def test_the_first_generation_counts_when_all_machines_of_the_start_have_asked():
    assert agreed_by([member("a", -1, TWO, 0)]) is None
    assert agreed_by([member("a", -1, TWO, 0), member("c", -1, "")]) is None
    assert agreed_by([member("a", -1, TWO, 0), member("b", -1, TWO, 1)]) == (0, ["a", "b"])


def test_ranks_that_are_broken_before_all_machines_of_the_start_have_asked_do_not_wait_for_the_rest():
    lost = member("a", -1, TWO, 0, is_broken=True)
    assert agreed_by([lost]) == (1, ["a"])
    assert agreed_by([lost, member("c", -1, "")]) == (1, ["a", "c"])
    assert agreed_by([lost, member("b", -1, digest(["a", "b", "c"]), 1)]) is None
    assert agreed_by([member("c", -1, "", is_broken=True)]) is None  # nobody holds the state
    # The other one asks late.
    assert agreed_by([member("a", 1, digest(["a"]), 0), member("b", -1, TWO, 1)]) == (2, ["a", "b"])


def test_without_a_loss_a_generation_goes_on():
    assert agreed_by([member("a", 3, TWO, 0), member("b", 3, TWO, 1)]) is None


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([member("a", 3, TWO, 0), member("b", 3, TWO, 1, is_broken=True)], (4, ["a", "b"])),
        ([member("b", 3, TWO, 1)], (4, ["b"])),
        # It takes the first place that is free; in the order of places, not of names.
        ([member("A", -1, ""), member("a", 3, TWO, 0), member("b", 3, TWO, 1)], (4, ["a", "b", "A"])),
        ([member("b", 3, TWO, 1), member("c", -1, "")], (4, ["c", "b"])),
        ([member("b", 3, TWO, 1), member("c", -1, "", 7)], (4, ["b", "c"])),
        # The others went on without it: it comes again when it has other ranks.
        ([member("a", 4, digest(["a"]), 0), member("b", 3, TWO, 1)], None),
    ],
    ids=["broken", "lost", "joins", "takes a place", "has a place", "left out"],
)
def test_the_next_generation(found, expected):
    assert agreed_by(found) == expected
    assert agreed_by(found[::-1]) == expected


A, B = member("a", 3, TWO, 0, most=2), member("b", 3, TWO, 1, most=2)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([A, B, member("c", -1, "")], None),
        ([A, B, member("c", -1, "", 1)], None),
        ([A, B._replace(is_broken=True), member("c", -1, "")], (4, ["a", "b"])),
        ([A, member("c", -1, ""), member("d", -1, "")], (4, ["a", "c"])),
        ([B, member("c", -1, "", 1), member("d", -1, "", 0)], (4, ["d", "b"])),
        ([A, member("c", -1, "", 1), member("d", -1, "", 1)], (4, ["a", "c"])),
        # Of those that began the job, one asks late, when its place is another one's.
        ([A, B, member("c", -1, digest(["a", "c"]), 1)], None),
    ],
    ids=["too many", "its place is taken", "broken", "two for a place", "places", "two for the same", "late"],
)
def test_there_are_no_more_machines_than_nnodes_allows(found, expected):
    assert agreed_by(found) == expected
    assert agreed_by(found[::-1]) == expected


def test_nobody_goes_on_with_a_machine_whose_ranks_have_ended():
    assert agreed_by([member("a", 3, TWO, 0, is_done=True), member("b", 3, TWO, 1, is_broken=True)]) is None


def test_the_address_of_a_lighthouse_is_checked():
    check_lighthouse(None, 1)
    check_lighthouse("host:29510", 2)
    with pytest.raises(ConfigurationError) as caught:
        check_lighthouse("host", 2)
    assert str(caught.value) == "--lighthouse host is not an address.\nPass <host>:<port>."
    with pytest.raises(ConfigurationError) as caught:
        check_lighthouse("host:1", 1)
    assert str(caught.value) == "--lighthouse needs several machines.\nAdd --nnodes, or omit --lighthouse."


class Board:
    """The store of the launchers, with the notes of this one."""

    def __init__(self):
        self.notes, self.found, self.holder = [], {}, None

    def others(self, topic):
        return self.found

    def post(self, topic, note):
        self.notes.append(note)

    def least(self, topic, order, note=None):
        self.holder = min((each for each in (note, self.holder) if each is not None), key=order, default=None)
        return self.holder


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start a machine with a rank that is ready, and a lighthouse that answers with these others; None: it does not.

    ``timeout_s`` is short where it has to expire, and else so long that load does not matter.
    """
    rank_files.announce_recovery(tmp_path, 7)
    started = []

    def begin(others, *, joins=None, place=None, timeout_s=60.0):
        monkeypatch.setenv("LOCKSTEP_MACHINE_TIMEOUT_S", str(timeout_s))

        class Client:
            def __init__(self, address, timeout):
                if others is None:
                    raise RuntimeError("nobody listens")

            def heartbeat(self, name, timeout):
                pass

            def quorum(self, name, timeout, *, data):
                rows = [data, *(each._asdict() for each in others)]
                return types.SimpleNamespace(participants=[types.SimpleNamespace(data=row) for row in rows])

        monkeypatch.setattr(quorum, "_torchft", lambda: types.SimpleNamespace(LighthouseClient=Client))
        place = 0 if joins is place is None else place
        started.append(Machines(tmp_path, [7], Board(), "127.0.0.1", place, 2, 1, 2, 0, "host:1", joins))
        return started[-1]

    yield begin
    for machines in started:
        machines.close()


def test_ranks_go_on_without_a_machine_that_was_lost_before_it_asked(start, tmp_path):
    machines = start([], timeout_s=0.3)
    rank_files.report_broken(tmp_path, 7, 0)
    assert poll_until(lambda: machines.poll() is not None or machines.number == 1, 60, 0.02)
    found = rank_files.Generation.read(tmp_path)
    assert (found.number, found.ranks, found.world_size) == (1, {7: 0}, 1)
    assert [note.have_met for note in machines.board.notes] == [False, True]


def test_ranks_that_are_not_broken_wait_for_a_machine_that_has_not_asked(start, tmp_path):
    machines = start([])
    assert machines.poll() is None
    assert not poll_until(lambda: machines.number >= 0, 1, 0.02)
    assert rank_files.Generation.read(tmp_path) is None


def test_a_machine_that_would_join_at_the_end_of_the_job_ends(start):
    machines = start(
        [member("a", 3, digest(["a"]), 0, is_done=True)], joins=Lighthouse(0, "http://host:1", "job", True)
    )
    with pytest.raises(RendezvousClosedError):
        poll_until(lambda: machines.poll() is not None, 60, 0.02)


JOB = Lighthouse(0, "http://host:1", "job", True)


def test_a_machine_too_many_waits_for_a_place(start, capfd):
    machines = start(others := [A, B], joins=JOB)
    message = "the job has the 2 machines of --nnodes; this one waits for a place"
    assert poll_until(lambda: machines.poll() is not None or message in capfd.readouterr().err, 60, 0.02)
    assert machines.number < 0
    others.remove(B)
    assert poll_until(lambda: machines.poll() is not None or machines.number == 4, 60, 0.02)
    assert (machines.number, machines.place) == (4, 1)


def test_a_machine_that_has_waited_for_a_place_ends_with_the_job(start):
    machines = start(others := [A, B], joins=JOB)
    assert poll_until(lambda: machines.poll() is not None or machines._answer, 60, 0.02)
    others[:] = [A._replace(is_done=True), B._replace(is_done=True)]
    with pytest.raises(RendezvousGracefulExitError):
        poll_until(lambda: machines.poll() is not None, 60, 0.02)


def test_a_machine_whose_node_rank_another_launcher_has_ends(start):
    machines = start([A, B], joins=JOB, place=1, timeout_s=0.3)
    with pytest.raises(LockstepError) as caught:
        poll_until(lambda: machines.poll() is not None, 60, 0.02)
    assert str(caught.value) == "the job goes on with another launcher that has --node-rank 1"


def test_a_launcher_that_was_replaced_while_it_was_stopped_ends(start):
    machines = start([])
    machines.board.holder = [0, -9, "another one, of an earlier start"]
    machines.check_place(machines.board)  # this one has taken none yet
    machines.found = Lighthouse(1, "http://host:1", "job", False)
    assert poll_until(lambda: machines.poll() is not None or machines._answer, 60, 0.02)
    machines._take([member(f"job/{place}", -1, digest(["job/0", "job/1"]), place) for place in range(2)])
    machines.check_place(machines.board)
    machines.board.holder = [-1, -9, "another one"]
    with pytest.raises(LockstepError) as caught:
        machines.check_place(machines.board)
    assert str(caught.value) == "the job goes on with another launcher that has --node-rank 0"


def test_a_machine_of_the_start_that_comes_too_late_for_its_place_ends(start):
    machines = start([member("a", 3, TWO, 1, most=2), member("b", 3, TWO, 0, most=2)], timeout_s=0.3)
    with pytest.raises(LockstepError, match="another launcher that has --node-rank 0"):
        poll_until(lambda: machines.poll() is not None, 60, 0.02)


def test_a_machine_that_the_first_one_waits_for_in_a_later_start_begins_again(start):
    machines = start([], place=1)
    machines.board.found = {"1": Lighthouse(1, "http://host:1", "job", True)}
    assert poll_until(lambda: machines.poll() is not None, 60, 0.02)
    assert machines.poll() == "the other machines went on without this one; its ranks end, and it joins again"


def test_the_machine_with_the_lighthouse_keeps_its_ranks(start):
    """It was stopped for a while: nobody went on without it."""
    machines = start([])
    assert poll_until(lambda: machines.poll() is not None or machines._answer, 60, 0.02)
    machines._server, machines._alive_at_s = object(), 0.0
    machines.found = machines.found._replace(is_served=True)
    assert machines.poll() is None


def test_a_machine_that_would_join_looks_again_if_the_lighthouse_does_not_answer(start):
    machines = start(None, joins=Lighthouse(0, "http://host:1", "job", True), timeout_s=0.3)
    reasons = set()
    assert poll_until(lambda: bool(reasons.add(machines.poll()) or reasons - {None}), 60, 0.02)
    assert reasons - {None} == {"this machine has not reached the others for 0.3 s; its ranks end, and join again"}
