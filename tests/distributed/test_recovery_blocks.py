"""Blocks of a script other than "one update, at the end": made right if a rank is lost, or refused with the reason."""

import copy
import json
import os
import re

import pytest
import torch

import lockstep
from lockstep.telemetry.record import read_run
from tests.distributed.commands import lockstep as run_lockstep
from tests.distributed.test_recovery import FAULTS
from tests.models import soak

# Two models and optimizers, one of them scaled, collectives between and behind the updates, and parts of all kinds.
GAN = (
    FAULTS
    + """
import hashlib
import lockstep
import torch.distributed as dist

class Counter:
    value = 0.0
    def state_dict(self):
        return {"value": self.value}
    def load_state_dict(self, state):
        self.value = state["value"]

torch.set_num_threads(1)
with lockstep.init() as world:
    torch.manual_seed(0)
    def network():
        return lockstep.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)))
    critic, generator = network(), network()
    ema = torch.optim.swa_utils.AveragedModel(generator.module, use_buffers=True)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
    generator_optimizer = torch.optim.SGD(generator.parameters(), lr=1e-2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(generator_optimizer, 0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
    counter = Counter()
    recovery = lockstep.Recovery(
        world, critic=critic, generator=generator, critic_optimizer=critic_optimizer, counter=counter, ema=ema,
        generator_optimizer=generator_optimizer, schedule=schedule, scaler=scaler,
    )
    if "begin0@1" in os.environ["FAULTS"] and world.rank == 0:
        time.sleep(0.3)  # the rank that is to go on comes late to the first block
    while recovery.step < 12:
        with recovery.attempt():
            step = recovery.step
            random = torch.Generator().manual_seed(100 * step + world.rank)
            counter.value += 1
            lose(f"begin{step}")
            loss = critic(torch.randn(4, 8, generator=random)).square().mean() * counter.value
            scaler.scale(loss).backward()
            scaler.unscale_(critic_optimizer)
            nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
            scaler.step(critic_optimizer)
            scaler.update()
            critic_optimizer.zero_grad()
            lose(f"between{step}")
            loss = critic(generator(torch.randn(4, 8, generator=random))).square().mean()
            loss.backward()
            generator_optimizer.step()
            schedule.step()
            generator_optimizer.zero_grad()
            critic_optimizer.zero_grad()
            ema.update_parameters(generator.module)
            lose(f"behind{step}")
            dist.all_reduce(loss.detach())
            counter.value += 0.5
    states = critic.state_dict(), generator.state_dict(), ema.state_dict()
    tensors = b"".join(value.numpy().tobytes() for state in states for value in state.values())
    rest = [counter.value, schedule.state_dict(), scaler.state_dict()]
    print("state", world.rank, hashlib.sha1(tensors + repr(rest).encode()).hexdigest())
"""
)

# What is refused, and the losses that show it: each start of the ranks is of the next kind.
REFUSED = {
    "optimizer": ("", "SGD.step() was called in a block of lockstep.Recovery, which has no such part"),
    "schedule": ("begin3@1", "ExponentialLR has another state on the rank that takes the place of a lost one"),
    "counter": ("begin3@1", "lr of parameter group 0 (optimizer) differs between rank 0 and rank 1"),
    "accumulation": ("begin3@1", "No rank that is left holds the state of the run"),
    "late": ("end5@1", "No rank that is left holds the state of the run"),
    "hook": ("begin3@1", "A communication hook with a state cannot go on in place"),
    "overlap": ("begin3@1", "A step with overlap_optimizer() cannot be done again"),
}
NOTHING = {"nothing": ("begin3@1 begin6@0", "")}

# One optimizer, which is given to Recovery or not, and some other thing that is not.
FORGETFUL = (
    FAULTS
    + """
import json, sys
import lockstep

kinds = json.loads(sys.argv[1])
kind = [*kinds][int(os.environ["TORCHELASTIC_RESTART_COUNT"])]
os.environ["FAULTS"], _ = kinds[kind]
os.environ["ONCE"] += kind
torch.set_num_threads(1)
with lockstep.init() as world:
    torch.manual_seed(0)
    model = lockstep.DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    parts = {} if kind == "optimizer" else {"optimizer": optimizer}
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if kind == "schedule" else None
    factor = 1.0
    if kind == "hook":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        model.register_comm_hook({"count": 0}, lambda state, bucket: default_hooks.allreduce_hook(None, bucket))
    if kind == "overlap":
        model.overlap_optimizer(optimizer)
    recovery = lockstep.Recovery(world, model=model, **parts)
    while recovery.step < 8:
        try:
            with recovery.attempt():
                step = recovery.step
                lose(f"begin{step}")
                loss = model(torch.ones(2, 8) * step).square().mean()
                loss.backward()
                if kind == "accumulation" and step % 2 == 0:
                    continue
                if kind != "overlap":
                    optimizer.step()
                if kind == "schedule":
                    schedule.step()
                if kind == "counter":
                    factor += 1
                    optimizer.param_groups[0]["lr"] = 1e-3 / factor
                if kind == "late" and step == 5:  # not in the first block
                    torch.distributed.all_reduce(loss.detach())
                    lose("end5")
                    torch.distributed.all_reduce(loss.detach())
                optimizer.zero_grad()
        except Exception as error:
            with open(f"{os.environ['ONCE']}-refused", "a") as file:
                print(error, file=file)
            raise
    world.print("done", recovery.step)
"""
)


@pytest.fixture
def run(tmp_path):
    """Return a function that runs a script with faults."""

    def run(script, faults, *args, restarts=6, code=0):
        (tmp_path / "train.py").write_text(script)
        environ = {**os.environ, "FAULTS": faults, "ONCE": str(tmp_path / f"once-{abs(hash((faults, args)))}")}
        done = run_lockstep(
            "run", "--devices", "2", "--max-restarts", str(restarts), tmp_path / "train.py", *args, env=environ
        )
        assert done.code == code, done.err
        return done

    return run


def test_several_updates_and_collectives_behind_them(run):
    undisturbed = sorted(re.findall("state .*", run(GAN, "").out))
    assert len(undisturbed) == 2 and len({line.split()[-1] for line in undisturbed}) == 1
    done = run(GAN, "begin0@1 between2@0 behind3@1 between5@1 begin7@0 behind11@0")
    assert sorted(re.findall("state .*", done.out)) == undisturbed, done.err
    assert done.err.count("is back") == 6 and "restart" not in done.err


@pytest.mark.parametrize(("where", "lost"), [("before", 1), *soak([("after", 0)])])
def test_the_monitor_counts_the_steps_of_a_block_that_is_done_again_once(run, tmp_path, where, lost):
    folder, left = tmp_path / "record", 1 - lost
    call = f"    lockstep.monitor([critic, generator], run_dir={str(folder)!r})\n"
    place = re.search(r"^    recovery = " if where == "before" else r"^    while ", GAN, re.MULTILINE).start()
    # The critic has two updates in a block; each ends a step of the monitor, and that of the generator does not.
    second = """
            lose(f"middle{step}")
            critic(torch.ones(4, 8)).mean().backward()
            critic_optimizer.step()
            critic_optimizer.zero_grad()"""
    script = (GAN[:place] + call + GAN[place:]).replace("scaler.update()", "scaler.update()" + second)
    done = run(script, f"begin1@{lost} middle3@{lost} between6@{lost} behind9@{lost}")
    assert done.err.count("is back") == 4 and "restart" not in done.err
    record = read_run(folder)
    steps = {rank: [line.step for line in record.ranks[rank].steps] for rank in range(2)}
    assert record.gaps == [] and steps[left] == [*range(24)]
    # Of a rank that is lost, the last steps before that may not have been written.
    assert [step for step in steps[lost] if step >= 18] == [*range(18, 24)]
    assert [event.step for event in record.events if event.event == "recovery"] == [2, 6, 12, 18]
    ends = [event for rank in record.ranks.values() for event in rank.events if event.event == "end"]
    assert [(event.step, event.text) for event in ends] == [(24, "24 steps done")] * 2


def test_what_cannot_be_made_right_is_refused_and_the_next_start_goes_on_in_place(run, tmp_path):
    kinds = REFUSED | NOTHING
    done = run(FORGETFUL, "", json.dumps(kinds), restarts=24)
    for kind, (_, text) in REFUSED.items():
        (refused,) = tmp_path.glob(f"once-*{kind}-refused")
        assert text in refused.read_text(), kind
        assert text in done.err
    # A restart for each kind; two ranks were replaced, and then no rank failed.
    assert done.err.count("; restart ") == len(REFUSED)
    assert done.out.count("done 8") == 1 and list(tmp_path.glob("once-*nothing-refused")) == []
    assert len(re.findall("is back .* step (?:4|7) is done again", done.err)) >= 2


def test_a_collective_behind_the_update_of_a_later_block_is_nothing_to_refuse(run):
    done = run(FORGETFUL, "", json.dumps({"late": ["begin3@1 begin6@0", ""]}))
    assert done.err.count("is back") == 2 and "restart" not in done.err and "done 8" in done.out


def residuals_of_a_failed_step(world):
    """Return whether a reconnected engine has the residuals and bases that it had before a step."""
    found = []
    for method in ("int8", "powersgd:1"):
        torch.manual_seed(0)
        model = lockstep.DistributedDataParallel(torch.nn.Linear(64, 64), compression=method)
        for step in range(3):
            if step == 2:
                model.keep()
                before = copy.deepcopy(model.compression_state_dict())
            model(torch.randn(4, 64, generator=torch.Generator().manual_seed(step + world.rank))).sum().backward()
        model.restore()
        model.reconnect(world)
        model.reconnect(world)  # another rank was lost meanwhile
        after = model.compression_state_dict()
        found.append(any(bool(value.any()) for value in before["residuals"].values()))
        found += [torch.equal(value, after["residuals"][name]) for name, value in before["residuals"].items()]
        found += [torch.equal(value, after["bases"][name]) for name, value in before["bases"].items()]
    return found


def test_residuals_are_put_back(ranks):
    assert ranks(2)(residuals_of_a_failed_step) == [[True] * 7] * 2
