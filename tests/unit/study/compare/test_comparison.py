import json
import runpy
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from lockstep.study.compare.comparison import Comparison, judge
from tests.unit.study.compare.compare_planted import comparison, contender

AGREE = (
    "The losses agree with single's from the first step (within 0.0e+00) to step 55 (within 0.0e+00); "
    "tolerances: first step 1e-04, last step 1e-02, as shares of the first loss."
)


def sentences(found: Comparison) -> list[str]:
    """Return the verdict without its sentence on costs, for which there is test_cost.py."""
    return [each for each in judge(found).sentences if not each.startswith("Compared with an hour of single")]


def test_the_fastest_is_recommended_with_why_and_how_efficient_it_is():
    found = comparison(contender("single", 20.0), contender("ddp", 11.0, exposed_ms=1.1, data_ms=0.55))
    assert judge(found).use == "ddp"
    assert sentences(found) == [
        "Use ddp: 1.82x single's speed (1.82x to 1.82x).",
        "Of a step of ddp (11.0 ms), computing takes 85%, communication that is not hidden 10%, waiting for data 5%.",
        "80% efficiency on 2 devices is reached by ddp (91%).",
        AGREE,
    ]


def test_communication_that_was_not_measured_is_not_called_nothing():
    found = comparison(contender("single", 20.0), contender("dp", 11.0, data_ms=0.55))
    assert sentences(found)[1] == (
        "Of a step of dp (11.0 ms), computing and communication, which cannot be told apart, take 95%, "
        "waiting for data 5%."
    )


def test_of_two_that_tie_the_one_that_scales_further_is_recommended():
    noise = (1.0, 1.03, 0.97, 1.0, 1.0)
    found = comparison(
        contender("single", 20.0), contender("dp", 10.9, noise=noise), contender("ddp", 11.0, exposed_ms=0.5)
    )
    assert sentences(found)[0] == "Use ddp: 1.82x single's speed (1.82x to 1.82x). dp ties with it."


def test_several_that_tie_are_all_named():
    tied = [contender(name, 11.0, exposed_ms=0.5) for name in ("dp", "torch-ddp", "ddp")]
    found = comparison(contender("single", 20.0), *tied)
    assert sentences(found)[0] == "Use ddp: 1.82x single's speed (1.82x to 1.82x). dp and torch-ddp tie with it."


def test_torchs_own_is_recommended_where_ours_is_slower():
    found = comparison(
        contender("single", 20.0), contender("torch-ddp", 10.0, exposed_ms=1.0), contender("ddp", 12.0, exposed_ms=1.0)
    )
    assert judge(found).use == "torch-ddp"
    assert sentences(found)[0] == "Use torch-ddp: 2.00x single's speed (2.00x to 2.00x)."
    assert sentences(found)[2:4] == [
        "80% efficiency on 2 devices is reached by torch-ddp (100%) and ddp (83%).",
        "Our ddp is slower than torch-ddp: 0.83x its speed (0.83x to 0.83x).",
    ]


def test_a_model_too_small_to_gain_is_called_so_with_what_the_devices_lose():
    # On two devices the ideal is 1 ms; of the 4 ms that it takes, 2 are communication and 1 is something else.
    found = comparison(contender("single", 2.0), contender("ddp", 4.0, exposed_ms=2.0))
    assert judge(found).use == "single"
    assert sentences(found) == [
        "Use single: nothing else is as fast; ddp comes nearest at 0.50x single's speed (0.50x to 0.50x).",
        "The step is too short to gain from 2 devices at 32 samples each: communication takes 50% and other overhead "
        "25% of ddp's step of 4.0 ms. A larger batch or model gives the devices more to do.",
        "80% efficiency on 2 devices is not reached: ddp (25%).",
        AGREE,
    ]


def test_a_tie_with_single_is_no_gain():
    found = comparison(contender("single", 10.0), contender("ddp", 10.0, noise=(1.0, 1.05, 0.95, 1.0, 1.0)))
    assert sentences(found)[0] == (
        "More devices gain nothing: ddp ties with single at 1.00x single's speed (0.96x to 1.04x)."
    )
    assert judge(found).use == "single"


def test_rounds_that_are_too_uneven_to_tell_are_no_tie():
    found = comparison(contender("single", 10.0), contender("ddp", 8.0, noise=(1.0, 1.5, 0.8, 1.0, 1.0)))
    assert judge(found).use == ""
    assert sentences(found)[:2] == [
        "These rounds do not tell whether ddp is any faster: 1.25x single's speed (0.84x to 1.55x). "
        "For more rounds: lockstep compare digits.py --devices 2 --rounds 10",
        "Of a step of ddp (8.0 ms), computing and communication, which cannot be told apart, take 100%, "
        "waiting for data 0%.",
    ]


def test_a_narrow_range_that_holds_both_a_loss_and_a_gain_is_no_tie():
    found = comparison(contender("single", 10.0), contender("ddp", 9.7, noise=(1.0, 1.06, 0.95, 1.0, 1.0)))
    assert judge(found).use == ""
    assert sentences(found)[0].startswith(
        "These rounds do not tell whether ddp is any faster: 1.03x single's speed (0.98x to 1.07x)."
    )


@pytest.mark.parametrize("num_rounds", [1, 4])
def test_fewer_than_five_rounds_decide_nothing(num_rounds):
    noise = (1.0,) * num_rounds
    step_ms = {"single": 20.0, "torch-ddp": 12.0, "ddp": 10.0}
    single, torchs, ours = (contender(name, value, noise=noise) for name, value in step_ms.items())
    command = "lockstep compare digits.py --rounds 4 --devices 2 --set dim=8"
    found = comparison(single, torchs, ours, num_rounds=num_rounds, command=command)
    verdict = judge(found)
    assert verdict.use == ""
    assert verdict.sentences[0] == (
        f"Too few rounds to decide, {num_rounds} of 5: ddp comes to 2.00x single's speed (2.00x to 2.00x). "
        "For more rounds: lockstep compare digits.py --devices 2 --set dim=8 --rounds 10"
    )
    assert [text.split()[:2] for text in verdict.sentences[1:]] == [["The", "losses"], ["Compared", "with"]]
    called = judge(comparison(single, torchs, ours, num_rounds=num_rounds, command=""))
    assert called.sentences[0].endswith("For more rounds: rounds=10")


def test_what_ties_with_the_fastest_but_may_be_no_faster_than_single_is_not_recommended():
    uneven = contender("ddp", 11.5, noise=(1.0, 1.8, 0.9, 1.0, 1.0))
    found = comparison(contender("single", 20.0), contender("torch-ddp", 11.0), uneven)
    assert found.contenders[2].speed_up.low < 1.0 < found.contenders[2].speed_over(found.contenders[1]).high
    assert sentences(found)[0] == "Use torch-ddp: 1.82x single's speed (1.82x to 1.82x)."


def test_a_gain_of_three_percent_is_not_worth_the_trouble():
    found = comparison(contender("single", 10.3), contender("ddp", 10.0, exposed_ms=1.0))
    assert sentences(found)[0] == (
        "Use single: ddp gains too little to be worth the trouble, 1.03x single's speed (1.03x to 1.03x)."
    )


def test_a_starving_single_is_told_to_load_faster_and_not_that_it_is_small():
    found = comparison(contender("single", 10.0, data_ms=4.0), contender("ddp", 10.5, exposed_ms=1.0))
    assert sentences(found)[1] == (
        "Single waits for data during 40% of its step: faster loading gains more than devices do."
    )


def test_on_a_cpu_a_step_as_long_as_singles_lost_nothing():
    found = comparison(contender("single", 10.0), contender("ddp", 10.2, exposed_ms=0.51), device="cpu")
    assert sentences(found)[1:3] == [
        "Of a step of ddp (10.2 ms), computing takes 95%, communication that is not hidden 5%, waiting for data 0%.",
        "80% efficiency on 2 devices is not reached: ddp (49%). All share 2 cores, so 50% is single's own speed.",
    ]


def test_steps_that_wait_for_a_core_are_those_of_a_busy_machine():
    crowded = comparison(
        contender("single", 84.6, core_wait_ms=60.0), contender("ddp", 10.0, core_wait_ms=4.0), device="cpu"
    )
    assert sentences(crowded)[0] == (
        "The machine is not quiet: other programs use the cores, or the ranks are more than the cores. Steps waited "
        "for a core: single 71% and ddp 40% of their time. Compare again when the machine is quiet."
    )


def test_the_demo_ends_with_the_verdict_on_a_busy_machine_too(tmp_path, monkeypatch, capsys):
    found = comparison(contender("single", 20.0, core_wait_ms=5.0), contender("ddp", 11.0), device="cpu")
    (tmp_path / "run").mkdir()
    lines = [{"kind": "step", "num_steps": 9}, {"kind": "event", "event": "evaluation", "metrics": {"accuracy": 0.5}}]
    (tmp_path / "run" / "rank-0.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "verify.json").write_text(json.dumps({"verdict": ["The same training run.", "More."]}))
    (tmp_path / "compare.json").write_text(json.dumps({"verdict": asdict(judge(found))}))
    script = (Path(__file__).parents[4] / "tools" / "demo.sh").read_text()
    (tmp_path / "end.py").write_text(script.partition("<<'END'\n")[2].removesuffix("END\n"))
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path), "2"])
    runpy.run_path(str(tmp_path / "end.py"))
    assert capsys.readouterr().out.splitlines()[1:] == [
        "Training: after 9 steps on 2 devices, 50.0% of the test digits are read right.",
        "Verify: The same training run.",
        f"Compare: {' '.join(judge(found).sentences[:2])}",
    ]
    assert judge(found).sentences[1].startswith("Use ddp: 1.82x single's speed")


def test_with_one_thread_a_device_efficiency_means_what_it_does_on_gpus():
    found = comparison(contender("single", 18.0, num_threads=1), contender("ddp", 10.0), device="cpu")
    assert sentences(found)[2:4] == ["80% efficiency on 2 devices is reached by ddp (90%).", AGREE]


def test_more_than_the_devices_can_give_is_no_merit_of_theirs():
    found = comparison(contender("single", 24.0), contender("ddp", 10.0))
    assert sentences(found)[2:4] == [
        "80% efficiency on 2 devices is reached by ddp (120%). More than 100% means that single is held back, "
        "as by caches: try another --global-batch-size.",
        AGREE,
    ]


def test_efficiency_names_who_reaches_it_and_who_does_not():
    found = comparison(
        contender("single", 20.0), contender("torch-dp", 16.0), contender("dp", 12.0), contender("ddp", 11.0)
    )
    assert sentences(found)[2] == (
        "80% efficiency on 2 devices is reached by dp (83%) and ddp (91%), not by torch-dp (62%)."
    )


@pytest.mark.parametrize(
    ("step_ms", "expected"),
    [
        (10.0, "Our ddp is faster than torch-ddp: 1.10x its speed (1.10x to 1.10x)."),
        (11.0, "Our ddp ties with torch-ddp: 1.00x its speed (1.00x to 1.00x)."),
        (12.0, "Our ddp is slower than torch-ddp: 0.92x its speed (0.92x to 0.92x)."),
    ],
)
def test_ours_against_torchs(step_ms, expected):
    found = comparison(contender("single", 20.0), contender("torch-ddp", 11.0), contender("ddp", step_ms))
    assert expected in sentences(found)


def test_losses_within_the_tolerances_agree():
    found = comparison(
        contender("single", 20.0, losses=(2.0, 1.0)), contender("ddp", 11.0, losses=(2.0 + 1e-4, 1.0 - 0.01))
    )
    assert sentences(found)[-1] == (
        "The losses agree with single's from the first step (within 5.0e-05) to step 55 (within 5.0e-03); "
        "tolerances: first step 1e-04, last step 1e-02, as shares of the first loss."
    )


def test_a_loss_that_is_off_from_the_first_step_is_named_with_its_cause():
    contenders = contender("single", 20.0), contender("dp", 12.0), contender("ddp", 11.0, losses=(2.002, 1.0))
    assert sentences(comparison(*contenders, split_layers=("batch norm", "dropout")))[-1] == (
        "The loss differs from single's: ddp (first step 1.0e-03, last step 0.0e+00); tolerances: first step 1e-04, "
        "last step 1e-02, as shares of the first loss. "
        "The model has batch norm and dropout, whose result depends on how a batch is split."
    )
    assert sentences(comparison(*contenders, precision="bf16"))[-1].startswith("The losses agree")


def test_a_loss_that_parts_later_without_a_reason_is_named():
    found = comparison(contender("single", 20.0), contender("ddp", 11.0, losses=(2.0, 1.1)))
    assert sentences(found)[-1] == (
        "The loss differs from single's: ddp (first step 0.0e+00, last step 5.0e-02); tolerances: first step 1e-04, "
        "last step 1e-02, as shares of the first loss. "
        "No layer of the model explains that: is the loss the mean over the batch's samples?"
    )


def test_a_loss_that_is_not_a_number_never_agrees():
    lost = comparison(contender("single", 20.0), contender("ddp", 11.0, losses=(2.0, float("nan"))))
    assert sentences(lost)[-1].startswith("The loss differs from single's: ddp (first step 0.0e+00, last step nan);")
    all_lost = comparison(contender("single", 20.0, losses=(2.0, float("nan"))), contender("ddp", 11.0))
    assert sentences(all_lost)[-1] == (
        "The loss of single is not finite, so losses cannot be compared: check the data and the learning rate."
    )


def test_a_wide_spread_asks_for_more_rounds():
    found = comparison(contender("single", 20.0, noise=(1.0, 1.0, 1.5, 1.0, 1.0)), contender("ddp", 11.0))
    assert sentences(found)[-1] == (
        "The rounds of single spread over 33% of their median. "
        "Use a quiet machine and more rounds (--rounds) for more precise figures."
    )


def test_single_alone_has_nothing_to_choose_from():
    assert sentences(comparison(contender("single", 20.0))) == [
        "Only single took part, so there is nothing to compare."
    ]
