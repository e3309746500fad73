"""Hugging Face Accelerate in a script, as its tour, and its guides of accumulation and checkpoints, write it.

Started by torchrun, which its documentation allows: `accelerate launch` needs MPI for several CPU processes.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import DistributedDataParallelKwargs, set_seed
from torch import nn
from torch.utils.data import DataLoader

from bench.conformance_peers import shared
from bench.conformance_peers.shared import SEEDS, UNUSED, Case, record

PACKAGES = ("accelerate",)
JOIN, SPLIT, SEEDABLE = "even_batches=False, join_uneven_inputs", "split_batches=True", "use_seedable_sampler=True"
ITEMS, STATEFUL = "num_items_in_batch by gather", "use_stateful_dataloader=True"
NOT_PREPARED = "loader not prepared"
OWN_SCHEDULE, SYNC, GATHER = "step_scheduler_with_optimizer=False", "SyncBatchNorm", "gather, not gather_for_metrics"
SWITCHES = {
    "uneven": (JOIN, SPLIT),
    "tokens": (ITEMS,),
    "accumulate": (ITEMS,),
    "schedule": (OWN_SCHEDULE, SPLIT),
    "batchnorm": (SYNC,),
    "shuffle": (SEEDABLE, SPLIT),
    "look": (SEEDABLE,),
    "first": (SEEDABLE,),
    "resume": (SEEDABLE, STATEFUL),
    "metrics": (GATHER,),
    "fewer": ("join_uneven_inputs",),
    "unfreeze": (UNUSED,),
    "dropout": (SEEDS,),
    "divided": (NOT_PREPARED,),
}
command = shared.torchrun


def train(case: Case) -> None:
    """Train or evaluate."""
    set_seed(0)
    switch = case.switch
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=case.accumulate,
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)] if switch == UNUSED else None,
        step_scheduler_with_optimizer=switch != OWN_SCHEDULE,
        dataloader_config=DataLoaderConfiguration(
            even_batches=switch != JOIN,
            split_batches=switch == SPLIT,
            use_seedable_sampler=switch == SEEDABLE,
            use_stateful_dataloader=switch == STATEFUL,
        ),
    )
    rank, num_ranks = accelerator.process_index, accelerator.num_processes
    module: nn.Module = shared.make_model(case)
    if switch == SEEDS:
        set_seed(0, device_specific=True)
    if switch == SYNC:
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    batch_size = shared.BATCH // case.accumulate if switch == SPLIT else case.micro_batch(num_ranks)
    loader: Any = DataLoader(shared.make_data(case), batch_size=batch_size, shuffle=case.shuffle)
    optimizer = shared.make_optimizer(module.parameters())
    scheduler = shared.make_schedule(optimizer)
    second: Any = DataLoader(shared.make_second(case), batch_size=batch_size // 2)
    model, optimizer, scheduler = accelerator.prepare(module, optimizer, scheduler)
    if switch != NOT_PREPARED:
        loader, second = accelerator.prepare(loader, second)
    if case.evaluates:
        evaluate(case, accelerator, model, loader)
        return
    step, first_epoch, num_skipped, folder = 0, 0, 0, Path(case.folder)
    saved = sorted(folder.glob("step_*"), key=lambda path: int(path.name.split("_")[1]))
    if saved and (case.resumes or case.kill_at):
        accelerator.load_state(str(saved[-1]))
        step = int(saved[-1].name.split("_")[1])
        first_epoch, num_skipped = divmod(step, -(-len(loader) // case.accumulate))
    if case.looks and rank == 0:
        next(iter(loader))
    if case.evaluates_first:
        test = DataLoader(shared.make_data(case), batch_size=batch_size)
        evaluate(case, accelerator, model, accelerator.prepare(test))
        model.train()
    shared.freeze_late(case, module)
    for epoch in range(first_epoch, case.epochs):
        shared.unfreeze_if_due(case, epoch, module)
        if switch != NOT_PREPARED:
            loader.set_epoch(epoch)
        batches = loader
        if epoch == first_epoch and num_skipped and switch != STATEFUL:
            batches = accelerator.skip_first_batches(loader, num_skipped * case.accumulate)
        joins = "join_uneven_inputs" in switch
        with accelerator.join_uneven_inputs([model]) if joins else nullcontext():
            if switch == ITEMS:
                by_items(case, accelerator, model, optimizer, batches)
                continue
            for batch in shared.read(case, rank, batches, second):
                shared.kill_if_due(case, rank, step + 1)
                with accelerator.accumulate(model):
                    accelerator.backward(shared.loss_of(model, batch))
                    if accelerator.sync_gradients:
                        if case.edits:
                            shared.first_parameter(module).grad.mul_(2)
                        if case.clip is not None:
                            accelerator.clip_grad_norm_(model.parameters(), case.clip)
                        step += 1
                    optimizer.step()
                    if case.schedule:
                        scheduler.step()
                    optimizer.zero_grad()
                shared.edit_if_due(case, rank, step, module)
                if step == case.stop_at:
                    accelerator.save_state(str(folder / f"step_{step}"))
                    return
        if case.kill_at:
            accelerator.save_state(str(folder / f"step_{step}"))
        if case.alone and epoch == 0 and accelerator.is_main_process:
            accelerator.reduce(torch.zeros(1))
    shared.record_end(accelerator.unwrap_model(model))
    accelerator.end_training()


def by_items(case: Case, accelerator: Any, model: Any, optimizer: Any, loader: Any) -> None:
    """Train an epoch as the guide of accumulation does for samples of variable size."""
    for group in shared.groups(loader, case.accumulate):
        count = accelerator.gather(sum(shared.count_of(batch) for batch in group)).sum().item()
        for number, batch in enumerate(group, 1):
            with model.no_sync() if number < len(group) and accelerator.num_processes > 1 else nullcontext():
                loss = shared.loss_of(model, batch) * shared.count_of(batch)
                # The guide multiplies by the steps of accumulation, as backward divides by them.
                scale = accelerator.gradient_accumulation_steps * accelerator.num_processes / count
                accelerator.backward(loss * scale)
        optimizer.step()
        optimizer.zero_grad()


def evaluate(case: Case, accelerator: Any, model: Any, loader: Any) -> None:
    """Gather the outputs of all ranks."""
    gather = accelerator.gather if case.switch == GATHER else accelerator.gather_for_metrics
    model.eval()
    found = []
    for batch in loader:
        with torch.no_grad():
            found.append(gather((model(batch["inputs"]), batch["labels"])))
    logits, labels = (torch.cat(each) for each in zip(*found, strict=True))
    accuracy = (logits.argmax(-1) == labels).double().mean().item()
    record("metrics", loss=shared.loss_from(logits, labels).item(), accuracy=accuracy)
