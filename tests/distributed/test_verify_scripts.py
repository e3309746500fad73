"""`lockstep verify SCRIPT.py`, on scripts as other people write them: each with one error, or with none."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from lockstep.errors import ConfigurationError
from lockstep.study.verify.fingerprint import DOUBLE
from lockstep.study.verify.script.verify_script import verify_script
from lockstep.study.verify.verdict import Cause, sentences

SCRIPTS = Path(__file__).parents[1] / "scripts" / "verify"

# What is found in each script with an error, and a part of the evidence.
WRONG = {
    "batch_not_divided": (Cause.BATCH, "takes 80 samples instead of 40: 40 on each of 2 ranks"),
    "loss_over_world_size": (Cause.SCALED, "gradients are 0.5 times those of one process, .* ends in Div by 2 <"),
    "grads_summed": (Cause.SCALED, "gradients are 2 times those of one process, and losses 1 times"),
    "sum_reduction": (Cause.SCALED, "ends in BinaryCrossEntropyWithLogits sum <"),
    "no_sampler": (Cause.SAMPLER, "All ranks train on the same samples: 32 in the first .* one process has 64"),
    "no_set_epoch": (Cause.EPOCH, "Two passes over TensorDataset of 256 have the same shuffled order"),
    "split_seeded_by_rank": (Cause.DATA, "of Subset of 960 on rank 1 is not that of one process"),
    "same_dropout_masks": (Cause.MASKS, "forward draws random numbers, and the generators of all ranks are equal"),
    "buffer_on_one_rank": (Cause.BUFFERS, "running differs between the ranks at step 1"),
    "temperature_on_rank_zero": (Cause.STATE, "attribute temperature has other values on the ranks at step 1"),
    "head_outside_ddp": (Cause.BESIDE, "updates 1:weight, 1:bias, which no data-parallel wrapper has"),
    "module_called_directly": (Cause.UNREDUCED, "forward was called on the module in the wrapper"),
    "partial_evaluation": (Cause.EVALUATION, r"its part \(200 and 200 of 400 samples\), and .* not combined"),
    "lr_times_world_size": (Cause.RATES, r"lr of group 0 at step 0 \(0.04 instead of 0.02\)"),
    "clip_before_reduce": (Cause.CLIPPED, "each rank clips its own gradients, and then they are averaged"),
    "mean_of_means": (Cause.WEIGHTING, "the ranks have 4 and 3 samples, but their means count alike"),
}
OTHERS_WRONG = {
    "step_in_no_sync": (Cause.UNREDUCED, "or backward in no_sync"),
    "cosine_over_local_batches": (Cause.RATES, "lr of group 0 at step 1"),
    "lockstep_uneven_unweighted": (Cause.WEIGHTING, "the ranks have 2 and 1 samples"),
    "accelerate_device_specific": (Cause.DATA, "on rank 1 is not that of one process"),
    "hf_trainer_per_device": (Cause.BATCH, "on each of 2 ranks"),
    "penalty_once_per_rank": (Cause.TERM, "gradients differ by 0.002 times the weights"),
    "ema_on_rank_zero": (Cause.BUFFERS, "differs between the ranks at step 1"),
    "files_shuffled_unseeded": (Cause.DATA, "23 of 30 samples are others"),
    "loaded_on_rank_zero": (Cause.MODEL, "on rank 1"),
    "never_broadcast": (Cause.MODEL, "initial parameter 0.weight on rank 1"),
    "local_negatives": (Cause.COUPLED, "are not parts of its loss"),
    "normalised_by_own_part": (Cause.DATA, "30 of 30 samples are others"),
    # Sound, but one rank alone shuffles without a sampler.
    "other_order_alone": (Cause.DATA, "each sample as often as one process, in another order"),
    "last_file_never_read": (Cause.DATA, "40 samples instead of 20"),
}
# By design, some of the scripts without an error do not give the same run.
SOUND = {
    "plain_ddp": (),
    "sync_batchnorm": (),
    "dropout_seeded_by_rank": ("dropout masks",),
    "local_batchnorm": ("batch norm statistics",),
    "gan_two_optimizers": (),
    "lockstep_weighted": (),
    "resumes_by_itself": (),
}
OTHERS_SOUND = {
    "saves_best": (),
    "accumulation_no_sync": (),
    "hand_made_average": (),
    "token_weighted": (),
    "warmup_by_step": (),
    "iterable_sharded": (),
    "amp_bf16": (),
    "accelerate_split": (),
    "lightning_module": (),
    "hf_trainer": (),
}
_soak = pytest.mark.soak
LIBRARIES = {"accelerate": "accelerate", "lightning": "lightning", "hf": "transformers"}


def cases(few, others):
    """The first run with every change, the others in `make soak`."""
    return [*few, *(pytest.param(name, marks=_soak) for name in others)]


def verified(name, num_devices=2):
    library = LIBRARIES.get(name.partition("_")[0])
    if library and find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    return verify_script([str(SCRIPTS / f"{name}.py")], devices=num_devices, report=lambda _: None)


@pytest.mark.parametrize("name", cases(WRONG, OTHERS_WRONG))
def test_the_error_of_a_script_is_named(name):
    cause, evidence = (WRONG | OTHERS_WRONG)[name]
    found = verified(name)
    assert [each.cause for each in found.findings] == [cause], found
    assert re.search(evidence, found.findings[0].evidence), found.findings[0].evidence
    assert (found.same, found.apart_from) == (False, ())


@pytest.mark.parametrize("name", cases(SOUND, OTHERS_SOUND))
def test_a_script_without_an_error_is_the_same_run(name):
    found = verified(name)
    apart_from = (SOUND | OTHERS_SOUND)[name]
    assert (found.same, found.apart_from) == (not apart_from, apart_from), found


@pytest.mark.soak
def test_a_schedule_that_follows_a_local_evaluation_has_two_causes():
    found = verified("plateau_on_local_loss")
    assert [each.cause for each in found.findings] == [Cause.RATES, Cause.EVALUATION]


def test_three_ranks_divide_a_batch_that_one_cannot():
    assert verified("lockstep_weighted", 3).same


def test_all_scripts_are_tested():
    # Lightning's own collectives after an evaluation look as if they combined its results.
    not_found = {"lightning_no_sync_dist"}
    tested = {*WRONG, *OTHERS_WRONG, *SOUND, *OTHERS_SOUND, "plateau_on_local_loss", *not_found}
    assert tested == {path.stem for path in SCRIPTS.glob("*.py")}


def test_a_script_that_updates_nothing_is_an_error(tmp_path):
    script = tmp_path / "none.py"
    script.write_text("print('hello')\n")
    with pytest.raises(ConfigurationError, match=r"none.py makes no update with one rank, so nothing can be compared"):
        verify_script([str(script)], report=lambda _: None)


def test_a_script_that_fails_on_ranks_is_not_the_same(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(
        "import os, torch\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "if os.environ['WORLD_SIZE'] != '1':\n"
        "    raise OSError('only for one')\n"
        "for _ in range(3):\n"
        "    model(torch.ones(4, 2)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    found = verify_script([str(script)], report=lambda _: None)
    assert not found.same
    assert [each.cause for each in found.findings] == [Cause.FAILED]
    assert "OSError: only for one" in found.findings[0].evidence
    assert found.verdict == "Not the same training run: the 2 ranks cannot train together."


def test_ranks_that_update_nothing_are_not_compared(tmp_path):
    script = tmp_path / "idle.py"
    script.write_text(
        "import os, torch\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(3 if os.environ['WORLD_SIZE'] == '1' else 0):\n"
        "    model(torch.ones(4, 2)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    assert sentences(verify_script([str(script)], report=lambda _: None)) == [
        "Not the same training run: the 2 ranks cannot train together.",
        "Nothing was compared, as not all ranks have made an update. Make it train with: lockstep run --devices 2 "
        "idle.py",
    ]


def test_a_double_script_is_compared_as_double_and_an_experiment_that_fails_is_not_judged(tmp_path):
    script = tmp_path / "double.py"
    script.write_text(
        "import lockstep, torch\n"
        "world = lockstep.init()\n"
        "data = torch.arange(8.0).view(4, 2).double()[world.rank :: world.world_size]\n"
        "model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(2, 1)).double()\n"
        "model = lockstep.DistributedDataParallel(model)\n"
        "torch.manual_seed(world.rank)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(3):\n"
        "    assert not model.module[0](data).equal(data), 'no dropout'\n"
        "    model(data).mean().backward()\n"
        "    optimizer.step()\n"
    )
    found = verify_script([str(script)], report=lambda _: None)
    assert (found.setup.precision, found.setup.tolerance, found.setup.engine) == ("float64", DOUBLE, "ddp")
    assert [(row.turned_off, row.same, row.error) for row in found.rows] == [("random", False, found.rows[0].error)]
    assert "AssertionError: no dropout" in found.rows[0].error


def test_a_script_may_train_without_end(tmp_path):
    script = tmp_path / "endless.py"
    script.write_text(
        "import lockstep, torch\n"
        "world = lockstep.init()\n"
        "torch.manual_seed(0)\n"
        "data = torch.randn(400, 4)\n"
        "model = lockstep.DistributedDataParallel(torch.nn.Linear(4, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "order = torch.Generator().manual_seed(0)\n"
        "while True:\n"
        "    batch = data[torch.randperm(400, generator=order)[:20]][world.rank :: world.world_size]\n"
        "    optimizer.zero_grad()\n"
        "    model(batch).square().mean().backward()\n"
        "    optimizer.step()\n"
    )
    found = verify_script([str(script)], report=lambda _: None)
    assert found.same
    assert len(found.setup.steps) == 12
