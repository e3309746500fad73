"""What a task may be, and what is said of one that cannot work."""

import re
from dataclasses import MISSING, fields
from pathlib import Path

import datasets
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import lockstep
from lockstep.cli.train import devices_of_flag
from lockstep.errors import ConfigurationError
from lockstep.train.plan import num_devices
from lockstep.train.settings import FitSettings
from lockstep.train.task import build_dataset, build_model, build_optimizer, check_registered
from tests.training import make_task


def message(function, *args, **kwargs):
    with pytest.raises(ConfigurationError) as error:
        function(*args, **kwargs)
    return str(error.value)


@pytest.mark.parametrize("value", [0, -3, 2.5, True, None])
@pytest.mark.parametrize("field", ["global_batch_size", "epochs"])
def test_numbers_must_be_positive_and_whole(field, value):
    assert message(make_task, **{field: value}) == f"Task.{field} is {value!r}.\nGive a whole number of at least 1."


@pytest.mark.parametrize(
    ("field", "value", "found", "advice"),
    [
        ("model", nn.Linear(1, 1), "Linear", ", such as model=Net, not model=Net()"),
        ("dataset", TensorDataset(torch.ones(1)), "TensorDataset", ", such as dataset=lambda: MyDataset(...)"),
        ("loss", "mse", "str", ", such as loss=my_loss, with def my_loss(model, batch)"),
        ("optimizer", None, "NoneType", ", such as optimizer=lambda params: AdamW(params, lr=3e-4)"),
        ("schedule", "cosine", "str", ""),
    ],
)
def test_what_makes_things_must_be_a_function(field, value, found, advice):
    assert message(make_task, **{field: value}) == f"Task.{field} is a {found}.\nGive a function{advice}."


def test_the_model_must_be_a_module_with_something_to_train():
    assert message(build_model, make_task(model=lambda: 3)) == (
        "Task.model returned a int, not a torch.nn.Module.\nReturn the model from it."
    )
    assert message(build_model, make_task(model=nn.Tanh)) == (
        "Tanh has no trainable parameter: it has no parameters.\n"
        "Set requires_grad on the parameters that should be trained."
    )
    assert message(build_model, make_task(model=lambda: nn.Linear(1, 1).requires_grad_(False))) == (
        "Linear has no trainable parameter: all of its parameters are frozen.\n"
        "Set requires_grad on the parameters that should be trained."
    )


def test_the_optimizer_gets_the_trainable_parameters_and_must_be_one():
    model = nn.Linear(1, 1)
    model.bias.requires_grad_(False)
    optimizer = build_optimizer(make_task(), model)
    assert [id(parameter) for group in optimizer.param_groups for parameter in group["params"]] == [id(model.weight)]
    assert message(build_optimizer, make_task(optimizer=lambda params: None), model) == (
        "Task.optimizer returned a NoneType, not a torch.optim.Optimizer.\nReturn the optimizer from it."
    )


def test_parameters_of_the_optimizer_that_no_module_registers_are_named():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.others = nn.Linear(2, 3), [nn.Linear(3, 1)]

    model = Net()
    optimizer = torch.optim.SGD([*model.parameters(), *model.others[0].parameters()], lr=0.1)
    text = message(check_registered, optimizer, model, is_alone=False)
    assert text.startswith(
        "The optimizer has parameters that no module of the model registers: number 2 of shape (1, 3), number 3 of "
        "shape (1,).\nOn several devices their gradients would not be averaged, and checkpoints leave them out. "
        "Register them: nn.ModuleList"
    )
    with pytest.warns(UserWarning, match="number 2 of shape"):
        check_registered(optimizer, model, is_alone=True)
    check_registered(torch.optim.SGD(model.parameters(), lr=0.1), model, is_alone=False)


def test_the_data_must_have_a_length_that_is_not_zero():
    assert message(build_dataset, make_task(dataset=list)) == (
        "The data set of Task.dataset is empty.\nCheck where it reads its samples from."
    )
    assert message(build_dataset, make_task(dataset=lambda: iter([1]))) == (
        "Task.dataset returned a list_iterator, which has no length or no index.\n"
        "Return a data set with len() and [], such as a torch.utils.data.Dataset, or list(...) of the samples.\n"
        "For a stream, return a torch.utils.data.IterableDataset whose __iter__ begins anew in each epoch; a generator "
        "can be read only once."
    )


def test_a_stream_may_be_trained_on_and_evaluated():
    class Stream(IterableDataset):
        """No length."""

        def __iter__(self):
            yield 1

    task = make_task(dataset=Stream, eval_dataset=Stream)
    assert isinstance(build_dataset(task), Stream)
    assert isinstance(build_dataset(task, evaluation=True), Stream)


def test_every_field_is_in_the_table_of_the_documentation():
    page = (Path(__file__).parents[3] / "docs" / "task.md").read_text()
    rows = [line.split("|") for line in page.split("All fields:")[1].splitlines() if line.startswith("| `")]
    assert [row[1].strip(" `") for row in rows] == [each.name for each in fields(lockstep.Task)]
    required = [each.name for each in fields(lockstep.Task) if each.default is each.default_factory is MISSING]
    assert [row[1].strip(" `") for row in rows if row[3].strip() == "required"] == required


def test_a_stream_that_is_split_by_node_is_warned_of():
    stream = datasets.IterableDataset.from_generator(lambda: iter([{"a": 1}]))
    assert build_dataset(make_task(dataset=lambda: stream)) is stream
    task = make_task(dataset=lambda: split_dataset_by_node(stream, 0, 2))
    text = (
        "Task.dataset returned a stream that split_dataset_by_node has divided: each rank reads another part, of which "
        "it takes its own.\nOmit split_dataset_by_node: Lockstep divides each global batch among the ranks."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        build_dataset(task)


def test_a_sampler_is_told_where_the_order_is():
    assert message(make_task, sampler=3) == (
        "unknown field of Task 'sampler'.\n"
        "The data set has the order: return torch.utils.data.Subset(dataset, indices) from Task.dataset, with indices "
        "grouped by length, or drawn with weights; fit shuffles them over the ranks."
    )


def test_devices_may_be_auto(gpus):
    gpus(0)
    assert num_devices("auto") == num_devices(None) == 1
    gpus(3)
    assert num_devices("auto") == num_devices(None) == 3
    assert FitSettings(devices="auto").devices == "auto"
    assert message(FitSettings, devices=0) == "devices=0 is not allowed.\nGive a whole number of at least 1, or auto."
    assert devices_of_flag("auto") is None
    assert devices_of_flag("2") == 2


def test_fit_trains_on_what_there_is():
    result = lockstep.fit(make_task(), devices="auto", steps=2, quiet=True)
    assert result.num_steps == 2
