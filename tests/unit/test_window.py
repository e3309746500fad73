"""What weights make of gradients while they are accumulated."""

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp.weighting import AccumulationWindow, all_zero

NUM_PARAMETERS = 3


class Script:
    """A window, and gradients that arrive one after the other, as autograd delivers them."""

    def __init__(self):
        self.parameters = [nn.Parameter(torch.zeros(2)) for _ in range(NUM_PARAMETERS)]
        self.used = set()
        self.window = AccumulationWindow(self.parameters, has_unweighed=False, shares_batch=False)

    def give(self, weight):
        self.window.on_forward()
        self.window.set_weight(weight)

    def backward(self, *gradients, accumulates=True, enters=True):
        if enters:
            self.window.begin_backward(self.used, accumulates=accumulates)
        for index, value in enumerate(gradients):
            if value is not None:
                parameter, gradient = self.parameters[index], torch.full((2,), float(value))
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad += gradient
                self.used.add(index)
                if accumulates:
                    self.window.on_local_gradient(index, self.used)

    def gradients(self):
        return [None if each.grad is None else each.grad[0].item() for each in self.parameters]

    def end(self):
        self.window.end(range(NUM_PARAMETERS), self.used)
        return self.gradients()


def test_gradients_are_kept_in_units_of_the_latest_weight():
    script = Script()
    script.give(6)
    script.backward(1, 2)
    script.give(2)
    script.backward(1, None, 5)
    assert script.gradients() == [4.0, 6.0, 5.0]
    assert (script.window.unit, script.window.total) == (2.0, 8.0)
    assert (script.window.is_weighed, script.window.has_unweighed) == (True, False)


def test_equal_weights_leave_gradients_alone():
    script = Script()
    script.give(3)
    script.backward(1)
    version = script.parameters[0].grad._version
    script.give(3)
    script.window.begin_backward(script.used, accumulates=True)
    assert script.parameters[0].grad._version == version


def test_a_weight_of_zero_keeps_nan_out():
    script = Script()
    script.give(2)
    script.backward(1, 7)
    script.give(0)
    script.backward(float("nan"), None, float("nan"))
    script.give(1)
    script.backward(1)
    assert script.end() == [3.0, 14.0, 0.0]
    assert (script.window.unit, script.window.total) == (1.0, 3.0)


def test_a_last_weight_of_zero_leaves_what_was_accumulated_in_its_own_unit():
    script = Script()
    script.give(2)
    script.backward(1, 7)
    script.give(0)
    script.backward(float("nan"), accumulates=False)
    assert script.end() == [1.0, 7.0, None]
    assert (script.window.unit, script.window.total) == (2.0, 2.0)


def test_nothing_but_zeros():
    script = Script()
    script.give(0)
    script.backward(float("inf"), accumulates=False)
    assert script.end() == [0.0, None, None]
    assert (script.window.unit, script.window.total) == (0.0, 0.0)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_clearing_the_gradients_begins_a_new_window(set_to_none):
    script = Script()
    script.give(6)
    script.backward(1, 2)
    for parameter in script.parameters:
        if parameter.grad is not None:
            parameter.grad = None if set_to_none else parameter.grad.zero_()
    script.give(2)
    script.backward(None, 5)
    assert script.gradients() == [None if set_to_none else 0.0, 5.0, None]
    assert (script.window.unit, script.window.total) == (2.0, 2.0)
    assert script.used == {1}


def test_gradients_that_are_zero_by_themselves_count():
    script = Script()
    script.give(6)
    script.backward(0, 0)
    script.give(2)
    script.backward(1)
    assert script.window.total == 8.0


def test_gradients_from_before_are_sent_with_the_total_weight():
    script = Script()
    for parameter in script.parameters:
        parameter.grad = torch.full((2,), 10.0)
    script.give(6)
    script.backward(1)
    script.give(2)
    script.backward(1)
    assert script.gradients() == [4.0, 0.0, 0.0]
    # In units of 2 with a total of 8, 10 is 40; what received no gradient is as it was.
    assert script.end() == [44.0, 10.0, 10.0]


def test_a_weight_counts_once_for_all_backwards_of_its_micro_batch():
    script = Script()
    script.give(3)
    script.backward(1)
    script.backward(1)
    assert (script.window.total, script.gradients()[0]) == (3.0, 2.0)
    script.window.close()
    script.backward(1)
    assert script.window.total == 3.0
    script.window.on_forward()
    script.backward(1)
    assert (script.window.is_weighed, script.window.has_unweighed) == (True, True)


def test_a_weight_that_no_backward_used_can_be_withdrawn_and_replaced():
    script = Script()
    script.give(3)
    assert script.window.discard_weight()
    assert not script.window.discard_weight()
    script.backward(1)
    assert (script.window.is_weighed, script.window.has_unweighed) == (False, True)
    script.window.close()
    script.give(3)
    script.give(5)
    script.backward(1)
    assert script.window.total == 5.0
    assert not script.window.discard_weight()


def test_gradients_that_arrive_before_any_output_was_noticed():
    script = Script()
    script.give(3)
    script.backward(1, 2, enters=False)
    assert (script.window.total, script.gradients()) == (3.0, [1.0, 2.0, None])
    script.give(3)
    script.backward(1, enters=False)
    assert (script.window.total, script.gradients()) == (6.0, [2.0, 2.0, None])
    script.give(4)
    with pytest.raises(ConfigurationError) as caught:
        script.backward(1, enters=False)
    assert str(caught.value) == (
        "A gradient arrived before any output of the model was reached, too late for its weight to count.\n"
        "Return all outputs as tensors, or in lists, dicts or dataclasses, and give weight() before backward."
    )


def test_zero_weight_for_gradients_that_arrive_before_any_output_was_noticed():
    script = Script()
    script.give(0)
    script.backward(float("nan"), float("nan"), enters=False)
    script.give(2)
    script.backward(1)
    assert script.end() == [1.0, 0.0, None]


def test_all_zero():
    assert all_zero([])
    assert all_zero([torch.zeros(2), torch.zeros(2, 2).to_sparse(1)])
    assert not all_zero([torch.zeros(2), torch.tensor([0.0, 1e-30])])
    assert not all_zero([torch.eye(2).to_sparse(1)])
    assert not all_zero([torch.tensor([float("nan")])])
