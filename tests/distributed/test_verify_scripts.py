"""`lockstep verify SCRIPT.py`, on scripts as other people write them: each with one error, or with none."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from lockstep.errors import ConfigurationError
from lockstep.study.verify.fingerprint import DOUBLE
from lockstep.study.verify.verdict import Cause, sentences
from tests.script_verifier import Verifier

SCRIPTS = Path(__file__).parents[1] / "scripts" / "verify"

# What is found in each script with an error, and a part of the evidence.
WRONG = {
    "batch_not_divided": (Cause.BATCH, "takes 80 samples instead of 40: 40 on each of 2 ranks"),
    "loss_over_world_size": (Cause.SCALED, "gradients are 0.5 times those of one process, .* ends in Div by 2 <"),
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
    "prepared_batch_divided_twice": (Cause.BATCH, "takes 32 samples instead of 64: the batch is divided twice"),
    "closure_polyak_local_loss": (Cause.UPDATE, "0.weight differs between the ranks after the update of step 0"),
    "endless_random_sampler_same": (Cause.SAMPLER, "All ranks .* same samples: 12 in the first .* one process has 24"),
    "accumulation_last_window": (Cause.WEIGHTING, "one process accumulates 3 micro-batches, and a rank 2"),
}
OTHERS_WRONG = {
    "windows_seeded_by_rank": (Cause.DATA, "do not train on what one process trains on"),
    "grads_summed": (Cause.SCALED, "gradients are 2 times those of one process, and losses 1 times"),
    "sum_reduction": (Cause.SCALED, "ends in BinaryCrossEntropyWithLogits sum <"),
    "prepared_buffer_on_rank_zero": (Cause.BUFFERS, "prior is not that of one process at step 1"),
    "same_augmentation_random": (Cause.MASKS, "Samples of .* draw random numbers when they are loaded, .* are equal"),
    "prepared_lr_times_world": (Cause.RATES, r"lr of group 0 at step 0 \(0.01\d* instead of 0.005"),
    "prepared_loss_over_world": (Cause.SCALED, "gradients are 0.5 times those of one process, .* ends in Div by 2 <"),
    "prepared_attribute_on_rank_zero": (Cause.STATE, "attribute beta has other values on the ranks at step"),
    "closure_not_divided": (Cause.BATCH, "takes 48 samples instead of 24: 24 on each of 2 ranks"),
    "same_dropout_gpt": (Cause.MASKS, "forward draws random numbers, and the generators of all ranks are equal"),
    "prepared_padding_counts": (Cause.WEIGHTING, "padding may count, too"),
    "prepared_sum_reduction": (Cause.SCALED, "ends in BinaryCrossEntropyWithLogits sum <"),
    "prepared_evaluation_not_combined": (Cause.EVALUATION, r"\(200 and 200 of 400 samples\), and .* not combined"),
    "prepared_bare_model": (Cause.UNREDUCED, "The gradient of 0.weight differs between the ranks"),
    "endless_sampler_not_divided": (Cause.SAMPLER, "same samples: 10 in the first .* one process has 20"),
    "look_ahead_no_sampler": (Cause.SAMPLER, "same samples: 32 in the first .* one process has 64"),
    "same_augmentation_torch": (Cause.MASKS, "Samples of .* draw random numbers when they are loaded, .* are equal"),
    "grads_averaged_twice": (Cause.SCALED, "gradients are 0.5 times those of one process, and losses 1 times"),
    "barlow_twins_all_reduce": (Cause.SCALED, "gradients are 0.5 times those of one process, and losses 1 times"),
    "files_one_after_another": (Cause.DATA, "do not train on what one process trains on"),
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
# What a script fails with on two ranks, which names its error.
FAILS = {
    "prepared_private_sampler": "The ranks have read different data",
}
OTHERS_FAIL = {
    "prepared_early_stop_local": "Rank 0 ended normally after 4 optimizer steps while rank 1 was still training",
    "prepared_scale_outside": "in group 1, that is in no prepared model",
    "prepared_split_seeded_by_rank": "gave different samples on rank 1 than on rank 0",
    "prepared_shuffled_listing": "gave different samples on rank 1 than on rank 0",
    "prepared_module_called": "uses gradients that were not averaged over the ranks",
    "prepared_stream_by_rank": "The ranks have read different data",
    "prepared_plateau_local": "lr of parameter group 0 differs between rank 0 and rank 1",
    "stop_by_local_loss": "Rank 0 ended normally after 12 optimizer steps while rank 1 was still training",
}
# By design, some of the scripts without an error do not give the same run.
SOUND = {
    "plain_ddp": (),
    "sequence_first": (),
    "optimizer_averages": (),
    "prepared_gan_noise": ("random numbers in forward",),
    "dropout_seeded_by_rank": ("dropout masks",),
    "local_batchnorm": ("batch norm statistics",),
    "gan_two_optimizers": (),
    "prepared_readme": (),
    "prepared_stream": (),
    "prepared_uneven_last_batch": (),
}
OTHERS_SOUND = {
    "sync_batchnorm": (),
    "wrapped_inside": (),
    "resumes_by_itself": (),
    "prepared_accumulation": (),
    "prepared_closure": (),
    "prepared_token_mean": (),
    "zero_grad_forgotten": (),
    "prepared_look_ahead": (),
    "prepared_reseeds_each_epoch": (),
    "prepared_two_models": (),
    "closure_lbfgs": (),
    "endless_random_sampler": (),
    "last_batch_known": (),
    "files_by_rank": (),
    "lockstep_weighted": (),
    "prepared_next_iter": (),
    "prepared_resumes": (),
    "dropout_accumulation": ("dropout masks",),
    "endless_stream": (),
    "prepared_dropout": ("dropout masks",),
    "prepared_same_dropout": ("dropout masks",),
    "prepared_augmentation": ("random augmentation",),
    "prepared_evaluation_gather": (),
    "prepared_local_batchnorm": ("batch norm statistics",),
    "prepared_sync_batchnorm": (),
    "prepared_two_loaders": (),
    "prepared_workers": (),
    "closure_divided": (),
    "endless_sampler": (),
    "look_ahead": (),
    "spawns_own_ranks": (),
    "manual_seed_each_epoch": (),
    "bf16_accumulation": (),
    "relative_output_folder": (),
    "mae_masking": ("random numbers in forward",),
    "diffusion_noise": ("random numbers in forward",),
    "dino_center": (),
    "vicreg_gather": (),
    "swav_sinkhorn": (),
    "accumulation_rest_dropped": (),
    "stop_by_reduced_loss": (),
    "grads_averaged_again": (),
    "batchnorm_tiny_batch": ("batch norm statistics",),
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


@pytest.fixture(scope="module")
def verify():
    """Give ``verify(script, devices=2)``: what is found."""
    verifier = Verifier()
    yield lambda script, **options: verifier.verify([script], **options)[0]
    verifier.close()


def path_of(name):
    library = LIBRARIES.get(name.partition("_")[0])
    if library and find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    return SCRIPTS / f"{name}.py"


@pytest.mark.parametrize("name", cases(WRONG, OTHERS_WRONG))
def test_the_error_of_a_script_is_named(verify, name):
    cause, evidence = (WRONG | OTHERS_WRONG)[name]
    found = verify(path_of(name))
    assert [each.cause for each in found.findings] == [cause], found
    assert re.search(evidence, found.findings[0].evidence), found.findings[0].evidence
    assert (found.same, found.apart_from) == (False, ())


@pytest.mark.parametrize("name", cases(SOUND, OTHERS_SOUND))
def test_a_script_without_an_error_is_the_same_run(verify, name):
    found = verify(path_of(name))
    apart_from = (SOUND | OTHERS_SOUND)[name]
    assert (found.same, found.apart_from) == (not apart_from, apart_from), found


@pytest.mark.parametrize("name", cases(FAILS, OTHERS_FAIL))
def test_the_error_of_a_script_that_fails_on_ranks_is_its_own(verify, name):
    found = verify(path_of(name))
    assert [each.cause for each in found.findings] == [Cause.FAILED]
    assert (FAILS | OTHERS_FAIL)[name] in found.findings[0].evidence


def test_a_script_that_fails_on_one_rank_is_not_verified(verify):
    with pytest.raises(ConfigurationError, match=r"prepared_sampler_kept\.py fails with one rank") as raised:
        verify(path_of("prepared_sampler_kept"))
    assert "A DataLoader has a DistributedSampler" in str(raised.value)


@pytest.mark.soak
def test_a_schedule_that_follows_a_local_evaluation_has_two_causes(verify):
    found = verify(path_of("plateau_on_local_loss"))
    assert [each.cause for each in found.findings] == [Cause.RATES, Cause.EVALUATION]


def test_three_ranks_divide_a_batch_that_one_cannot(verify):
    assert verify(path_of("lockstep_weighted"), devices=3).same


def test_all_scripts_are_tested():
    # Lightning's own collectives after an evaluation look as if they combined its results.
    not_found = {"lightning_no_sync_dist"}
    others = {"plateau_on_local_loss", "prepared_sampler_kept"}
    tested = {*WRONG, *OTHERS_WRONG, *SOUND, *OTHERS_SOUND, *FAILS, *OTHERS_FAIL, *others, *not_found}
    assert tested == {path.stem for path in SCRIPTS.glob("*.py")}


def test_a_script_that_updates_nothing_is_an_error(verify, tmp_path):
    script = tmp_path / "none.py"
    script.write_text("print('hello')\n")
    with pytest.raises(ConfigurationError, match=r"none.py makes no update with one rank, so nothing can be compared"):
        verify(script)


def test_a_script_that_fails_on_ranks_is_not_the_same(verify, tmp_path):
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
    found = verify(script)
    assert not found.same
    assert [each.cause for each in found.findings] == [Cause.FAILED]
    assert "OSError: only for one" in found.findings[0].evidence
    assert found.verdict == "Not the same training run: the 2 ranks cannot train together."


def test_ranks_that_update_nothing_are_not_compared(verify, tmp_path):
    script = tmp_path / "idle.py"
    script.write_text(
        "import os, torch\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(3 if os.environ['WORLD_SIZE'] == '1' else 0):\n"
        "    model(torch.ones(4, 2)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    assert sentences(verify(script)) == [
        "Not the same training run: the 2 ranks cannot train together.",
        "Nothing was compared, as not all ranks have made an update. Make it train with: lockstep run --devices 2 "
        "idle.py",
    ]


def test_a_double_script_is_compared_as_double_and_an_experiment_that_fails_is_not_judged(verify, tmp_path):
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
    found = verify(script)
    assert (found.setup.precision, found.setup.tolerance, found.setup.engine) == ("float64", DOUBLE, "ddp")
    assert [(row.turned_off, row.same, row.error) for row in found.rows] == [("random", False, found.rows[0].error)]
    assert "AssertionError: no dropout" in found.rows[0].error


def test_a_script_may_train_without_end(verify, tmp_path):
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
    found = verify(script)
    assert found.same
    assert len(found.setup.steps) == 12
