"""The causes that `verify` reads from the traces of a script, without running one."""

from dataclasses import replace

import torch

from lockstep.study.verify.fingerprint import fingerprint
from lockstep.study.verify.script.script_causes import (
    compare_traces,
    of_means,
    of_ranks,
    problem_of_evaluation,
    structural,
)
from lockstep.study.verify.script.trace import Pass, ScriptStep, ScriptTrace
from lockstep.study.verify.verdict import Cause


def step(number, samples, gradient=1.0, parameter=1.0, **others):
    tensors = {
        "gradient": {"w": fingerprint(torch.tensor([gradient, 2.0]))},
        "parameter": {"w": fingerprint(torch.tensor([parameter]))},
        "buffer": {},
    }
    samples = tuple(str(each).encode() for each in samples)
    about = {"drawn": {}, "num_backwards": 1, "operations": (), "before_clipping": None}
    about |= {"outside": (), "bypassed": False, "attributes": {}} | others
    return ScriptStep(number, samples, 1.0, {"lr of group 0": 0.1}, tensors, indices=samples, **about)


def trace(*steps, passes=()):
    initial = {"parameter": {"w": fingerprint(torch.tensor([0.0]))}, "gradient": {}, "buffer": {}}
    return ScriptTrace({"samples of the data set": 0}, initial, steps, passes=passes)


def trained(*indices):
    return Pass(f"TensorDataset of {5}", indices=list(indices), is_training=True)


def found(one, *ranks):
    return [(each.cause, each.evidence) for each in structural(one, ranks)]


def test_equal_traces_have_no_cause():
    ranks = [trace(step(0, [0, 1])), trace(step(0, [2, 3]))]
    one = trace(step(0, [3, 2, 1, 0]))
    assert compare_traces(one, ranks).same
    assert found(one, *ranks) == []
    assert list(of_ranks(ranks, ())) == []


def test_a_sample_that_pads_the_last_batch_counts_twice():
    one = trace(step(0, [0, 1, 2, 3]), step(1, [4]), passes=(trained(0, 1, 2, 3, 4),))
    first = trace(step(0, [0, 2]), step(1, [4]), passes=(trained(0, 2, 4),))
    second = trace(step(0, [1, 3]), step(1, [0]), passes=(trained(1, 3, 0),))
    assert found(one, first, second) == [(Cause.PADDED, "1 sample of TensorDataset of 5 count twice in an epoch.")]


def test_samples_that_are_dropped_are_missed():
    one = trace(step(0, [0, 1, 2, 3]), passes=(trained(0, 1, 2, 3, 4),))
    ranks = trace(step(0, [0, 2]), passes=(trained(0, 2),)), trace(step(0, [1, 3]), passes=(trained(1, 3),))
    assert found(one, *ranks) == [(Cause.DATA, "In an epoch, 1 of 5 samples are on no rank.")]


def test_a_rank_that_stops_earlier_makes_another_number_of_updates():
    one = trace(step(0, [0, 1]), step(1, [2, 3]))
    ranks = trace(step(0, [0]), step(1, [2])), trace(step(0, [1]))
    assert found(one, *ranks) == [(Cause.STEPS, "One process makes 2 updates, rank 0 2 and rank 1 1.")]


def test_an_update_may_depend_on_the_rank():
    ranks = [trace(step(0, [0])), trace(step(0, [1], parameter=1.5))]
    (cause,) = of_ranks(ranks, ())
    text = "w differs between the ranks after the update of step 0, its gradient does not."
    assert (cause.cause, cause.evidence) == (Cause.UPDATE, text)


def test_an_attribute_that_a_rank_lacks_is_not_another_value():
    # Of an average of the weights, which only rank 0 keeps.
    ranks = [
        trace(step(0, [0], attributes={}), step(1, [1], attributes={"Average:n": 2})),
        trace(step(0, [2], attributes={}), step(1, [3], attributes={})),
    ]
    assert list(of_ranks(ranks, ())) == []
    ranks = [trace(step(0, [0], attributes={"n": 1}), step(1, [1], attributes={"n": value})) for value in (1, 2)]
    assert [each.cause for each in of_ranks(ranks, ())] == [Cause.STATE]


def test_gradients_may_be_averaged_in_the_update():
    one = trace(step(0, [0, 1], gradient=2.0))
    ranks = [trace(step(0, [0], gradient=1.0)), trace(step(0, [1], gradient=3.0))]
    assert compare_traces(one, ranks).same
    assert list(of_ranks(ranks, ())) == []
    ranks = [trace(step(0, [0], gradient=1.0, parameter=0.9)), trace(step(0, [1], gradient=3.0, parameter=1.1))]
    assert [each.cause for each in of_ranks(ranks, ())] == [Cause.UNREDUCED]


def test_an_update_that_differs_on_all_ranks_is_told_from_its_gradient():
    one, ranks = trace(step(0, [0, 1])), [trace(step(0, [0], parameter=3.0)), trace(step(0, [1], parameter=3.0))]
    (cause,) = of_means(one, ranks, compare_traces(one, ranks).differences[0])
    assert cause.cause == Cause.UPDATE


def test_an_evaluation_needs_all_samples_or_a_sum():
    whole, half = Pass("data of 4", indices=[0, 1, 2, 3]), Pass("data of 4", indices=[0, 2])
    other = Pass("data of 4", indices=[1, 3])
    assert problem_of_evaluation(whole, [whole, half]) == ""
    assert problem_of_evaluation(whole, [replace(half, is_combined=True), other]) == ""
    assert problem_of_evaluation(whole, [half, half]) == "2 of 4 samples are evaluated"
    text = "each evaluates its part (2 and 2 of 4 samples), and the results are not combined"
    assert problem_of_evaluation(whole, [half, other]) == text
