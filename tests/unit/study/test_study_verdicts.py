"""Every verdict is a function of the table it stands under: of random tables, no sentence contradicts a row.

Sentences and tables are read as their reader does, with rounded numbers.
"""

import inspect
import json
import random
import re
from pathlib import Path

import pytest

from lockstep.study import tune as tuning
from lockstep.study.compare.comparison import judge, tables
from lockstep.study.doctor.findings import WORDS, Finding, Plan, Severity
from lockstep.study.doctor.findings import Report as Examination
from lockstep.study.links import Computing, Cost, Profile, ReadyBucket, given_link, parse_rate
from lockstep.study.predict import choose, forecast, list_methods, sentences, table, to_record
from lockstep.study.report.run_page import draw, ranks_table
from lockstep.study.report.view import compare_with_baseline, view_run
from lockstep.study.report.view import sentences as report_sentences
from lockstep.telemetry.provenance import Provenance
from tests.training import make_task
from tests.unit.study.compare.compare_planted import comparison, contender
from tests.unit.study.report.report_planted import session, step_line, write_run

DOCS = Path(__file__).parents[3] / "docs"


def random_tables(number):
    """Call a test for as many tables, each with its own seeded generator of random numbers."""

    def repeat(test):
        def run(**fixtures):
            for seed in range(number):
                try:
                    test(chance=random.Random(seed), **fixtures)
                except AssertionError as error:
                    raise AssertionError(f"with seed {seed}: {error}") from error

        fixtures = [each for each in inspect.signature(test).parameters.values() if each.name != "chance"]
        run.__signature__ = inspect.Signature([each.replace(kind=each.KEYWORD_ONLY) for each in fixtures])
        return run

    return repeat


def starting_with(texts, *starts):
    """Return the sentence with one of these starts; "" if there is none."""
    return next((text for text in texts if text.startswith(starts)), "")


# --- compare ----------------------------------------------------------------------------------------------------------

OTHERS = ("torch-dp", "dp", "torch-ddp", "ddp", "ddp-zero1", "ddp-local-bn")


def random_comparison(chance):
    """Return a comparison: often near the bounds, with ties, noise, waits for a core, and losses that differ."""
    names = sorted(chance.sample(OTHERS, chance.randint(1, 6)), key=OTHERS.index)
    spread = chance.choice((0.0, 0.003, 0.02, 0.3))
    num_rounds = chance.choice((4, 5, 9, 9))

    def one(name, speed_up):
        step_ms = 20.0 / speed_up
        return contender(
            name,
            step_ms,
            noise=[1.0 + chance.uniform(-spread, spread) for _ in range(num_rounds)],
            exposed_ms=chance.choice((None, 0.1 * step_ms)) if name != "single" else None,
            data_ms=chance.choice((0.0, 0.05, 0.4)) * step_ms,
            core_wait_ms=chance.choice((0.0, 0.0, 0.095, 0.0995, 0.37)) * step_ms,
            num_threads=chance.choice((1, 2)),
            losses=(2.0 + chance.choice((0.0, 0.0, 1.96e-4, 2.04e-4)), 1.0 + chance.choice((0.0, 0.0, 0.0199, 0.0201))),
        )

    bounds = (0.5, 0.994, 0.996, 1.0, 1.004, 1.006, 1.044, 1.046, 1.054, 1.25, 1.589, 1.591, 1.6, 2.009, 2.011)
    others = [one(name, chance.choice(bounds) + chance.choice((0.0, chance.uniform(-0.01, 0.01)))) for name in names]
    apart = tuple(name for name in names if chance.random() < 0.5)
    return comparison(one("single", 1.0), *others, num_rounds=num_rounds, norms_apart=apart)


RANGE = r"([\d.]+)x[^(]*\(([\d.]+)x to ([\d.]+)x\)"


def read_gains(found):
    """Return median, low and high of each row as the table shows them."""
    _, *rows = tables(found)[0].rows
    return {row[0]: (float(row[2][:-1]), *map(float, row[3].split(" - "))) for row in rows}


@random_tables(300)
def test_no_sentence_of_compare_contradicts_a_row(chance):
    found = random_comparison(chance)
    verdict, gains = judge(found), read_gains(found)
    texts, few = verdict.sentences, found.setup.num_rounds < 5
    first = starting_with(texts, "Use ", "More devices", "These rounds", "Too few")
    worth = [name for name, (median, low, _) in gains.items() if low > 1.0 and median >= 1.05]
    name = re.search(
        r"(?:Use (?!single)|Use single: nothing else is as fast; |Use single: |whether |of 5: |nothing: )([\w-]+)",
        first,
    )[1]
    assert tuple(map(float, re.search(RANGE, first).groups())) == gains[name], first
    assert few == first.startswith("Too few")
    if few:
        assert (verdict.use, gains[name][0]) == ("", max(gain[0] for gain in gains.values()))
    elif first.startswith(f"Use {name}: "):
        assert (verdict.use, name in worth) == (name, True)
        # What the table shows as faster is named, too.
        assert all(other in re.findall(r"[\w-]+", first) for other, gain in gains.items() if gain[0] > gains[name][0])
    else:
        assert worth == [], first
        if first.startswith("These rounds do not tell"):
            assert verdict.use == "" and gains[name][1] <= 1.0 <= gains[name][2]
        else:
            assert verdict.use == "single"
            assert all(low > 1.0 or high < 1.05 for _, low, high in gains.values()), first
        if first.startswith("Use single: nothing else is as fast"):
            assert all(high < 1.0 for _, _, high in gains.values())
        if first.startswith("More devices gain nothing"):
            assert all(low <= 1.0 for _, low, _ in gains.values())
        if "gains too little" in first or "comes nearest" in first:
            assert gains[name][0] == max(gain[0] for gain in gains.values())
    check_efficiency(starting_with(texts, "80% efficiency"), gains, few)
    check_against_torch(texts)
    check_core_wait(starting_with(texts, "The machine is not quiet"), found)
    check_losses(starting_with(texts, "The loss"))
    costs = starting_with(texts, "Compared with an hour")
    for name, hours in re.findall(r"([\w-]+) ([+-][\d.]+) h, ", costs):
        assert (gains[name][0] - 1.0) * float(hours) <= 0.0, costs
    norms = starting_with(texts, "Batch norms of")
    assert bool(norms) == bool(found.setup.norms_apart)
    ahead, _, behind = norms.partition(" normalise ")
    named = set(re.findall(r"(?:torch-)?d[a-z0-9-]*p(?:-zero1|-local-bn)?", ahead))
    assert named == set(found.setup.norms_apart)
    assert ("--no-sync-batchnorm" in behind) == (0 < len(named) < len(gains))
    cost = re.search(r"With them, ddp has ([\d.]+)x the speed of ddp-local-bn", behind)
    has_both = "--no-sync-batchnorm" in behind and {"ddp", "ddp-local-bn"} <= gains.keys() and "ddp" not in named
    assert bool(cost) == has_both
    assert not cost or float(cost[1]) == pytest.approx(gains["ddp"][0] / gains["ddp-local-bn"][0], abs=0.02)


def check_efficiency(text, gains, few):
    if few:
        assert text == ""
        return
    reached = re.search(r"reached by (.*?)(?:, not by|\.)", text)
    missed = re.search(r"(?:not by|not reached:) (.*?)\.", text)
    shares = {}
    for part, is_good in ((reached, True), (missed, False)):
        for name, percent in re.findall(r"([\w-]+) \((\d+)%\)", part[1] if part else ""):
            assert (int(percent) >= 80) == is_good, text
            assert name not in shares
            shares[name] = int(percent)
            assert abs(percent_of(gains[name][0] / 2) - int(percent)) <= 0.5 + 1e-6
    assert shares.keys() == gains.keys()
    assert ("More than 100%" in text) == any(share > 100 for share in shares.values())


def percent_of(share):
    return 100 * share


def check_against_torch(texts):
    for text in texts:
        if text.startswith("Our "):
            median, low, high = map(float, re.search(RANGE, text).groups())
            verb = "ties with" if low <= 1.0 <= high else "is faster than" if median > 1.0 else "is slower than"
            assert verb in text, text


def check_core_wait(text, found):
    # The last but one column of the second table, and the first.
    rows = {row[0]: float(row[-2]) / float(row[1]) for row in tables(found)[1].rows}
    assert bool(text) == (max(each.step.share("core_wait") for each in found.contenders) >= 0.1)
    for name, percent in re.findall(r"([\w-]+) (\d+)%", text):
        assert abs(percent_of(rows[name]) - int(percent)) < 0.6, text


def check_losses(text):
    tolerances = [float(number) for number in re.search(r"first step (\S+), last step (\S+), as shares", text).groups()]
    if text.startswith("The losses agree"):
        within = [float(number) for number in re.findall(r"within ([\d.e+-]+)\)", text)]
        assert all(value <= limit for value, limit in zip(within, tolerances, strict=True)), text
    else:
        shown = re.findall(r"\(first step (\S+), last step (\S+)\)", text)
        assert shown
        for firsts in shown:
            assert any(float(value) > limit for value, limit in zip(firsts, tolerances, strict=True)), text


@pytest.mark.parametrize("speed_up", [1.59, 1.594, 1.595, 1.5999, 1.6])
def test_80_percent_have_reached_80_percent(speed_up):
    found = comparison(contender("single", 10.0 * speed_up), contender("ddp", 10.0))
    (text,) = [each for each in judge(found).sentences if each.startswith("80%")]
    assert ("not reached" in text) == ("(79%)" in text)


# --- predict ----------------------------------------------------------------------------------------------------------


def random_forecast(chance):
    """Return a forecast of a task whose measured steps are noisy, over a link that may matter or not."""
    base_s, fixed_s = chance.choice((0.001, 0.02, 0.3)), chance.choice((0.0, 0.001, 0.05))
    noise = chance.choice((0.0, 0.1, 0.5))

    def computing(share):
        seconds = base_s * share / 32 * (1 + chance.uniform(-noise, noise))
        return Computing(seconds / 3, 2 * seconds / 3, fixed_s, 1.0, 1.0)

    size = chance.choice((100_000, 4_000_000, 43_000_000))
    buckets = (ReadyBucket(size // 10, 0.3), ReadyBucket(size, 1.0))
    profile = Profile(32, {share: computing(share) for share in (32, 16, 11, 8, 4)}, buckets, 2, 2)
    costs = {"ddp": Cost(cpu_s=1e-10), "bf16": Cost(0.5, 1e-10, 1e-10), "int8": Cost(0.25, 1e-9, 1e-9, staged=True)}
    link = given_link(chance.choice(("1Mb", "100Mb", "155Mb", "1Gb", "9.5Gb", "12MB/s", "100Gb", "800Gb")))
    return forecast("gpt", profile, list_methods(costs, profile), link, chance.choice((2, 3, 4, 8)))


def bytes_per_s(text):
    return parse_rate(text.replace("/s", ""))


@random_tables(300)
def test_no_sentence_of_predict_contradicts_a_row(chance):
    found = random_forecast(chance)
    number, texts, shown = found.num_machines, sentences(found), table(found)
    columns, rows = list(shown.columns), {row[0].rstrip("*"): [str(cell) for cell in row] for row in shown.rows}
    counts = [int(column.split()[0]) for column in columns if " machine" in column]
    speeds = {(row.method.name, count): found.speed_up(row, count) for row in found.rows for count in counts}
    for (name, count), speed_up in speeds.items():
        efficiency = int(re.search(r"(\d+)%", rows[name][columns.index(f"{count} machine{'s' * (count > 1)}")])[1])
        assert abs(percent_of(speed_up / count) - efficiency) <= 1.0
    column = {name: speed_up for (name, count), speed_up in speeds.items() if count == number}
    turn_on = starting_with(texts, "Not on", "No option", "Turn on")
    chosen = choose(found)
    fastest = re.search(rf"The fastest on {number} machines is (.+?): ([\d.]+) times", turn_on)
    if chosen is None:
        assert turn_on.startswith(f"Not on {number} machines: no option makes them 1.05 times as fast as one")
        assert max(column.values()) < 1.05
        named = re.search(r"The fastest of the table is (.+?) on (\d+) machines: ([\d.]+) times", turn_on)
        if named:
            assert float(named[3]) == speeds[named[1], int(named[2])] == max(speeds.values())
        else:
            assert "Train on one machine" in turn_on and max(speeds.values()) == 1.0
    else:
        best = column[chosen.method.name]
        assert best >= 1.05
        if given := re.search(r"^Turn on .*?\): ([\d.]+) times the speed", turn_on):
            assert float(given[1]) == best
        percent = int(re.search(r"(\d+)% of linear", turn_on)[1])
        assert abs(percent_of(best / number) - percent) <= 0.5 + 1e-6
        assert bool(fastest) == (max(column.values()) > best)
        if fastest:
            assert float(fastest[2]) == column[fastest[1]] == max(column.values())
    check_paying(texts, found, column, rows)
    record = to_record(found, Provenance("", {}, {}, {}))
    assert record["verdict"]["use"] == (chosen and chosen.method.name)


def check_paying(texts, found, column, rows):
    """The sentence on links names each method once, as the last column has it, and the present link agrees."""
    number = found.num_machines
    paying = starting_with(texts, f"{number} machines are", "No link")
    last = {name: row[-1] for name, row in rows.items()}
    if paying.startswith("No link"):
        assert set(last.values()) == {"never"}
        assert max(column.values()) < 1.05
        return
    pays = dict(reversed(each) for each in re.findall(r"([\d.]+ [kMGT]?b/s) on with ([\w :-]+?)(?=[,;.])", paying))
    never = re.search(r"; on no link with (.*)\.$", paying)
    assert {**pays, **dict.fromkeys(never[1].split(", ") if never else (), "never")} == last
    link = bytes_per_s(found.link.source.removesuffix(" as given"))
    for name, rate in last.items():
        is_enough = rate != "never" and bytes_per_s(rate) <= link * (1 + 1e-9)
        assert is_enough == (column[name] >= 1.05), (name, rate, column[name], found.link.source)


# --- report -----------------------------------------------------------------------------------------------------------


def random_run(folder, chance, num_ranks):
    """Return a recorded run: uneven steps, spikes, and waits for a core that differ from rank to rank."""
    batch, noise, waits = chance.choice((50, 64)), chance.choice((0.0, 0.3)), chance.choice((0.0, 0.1, 0.37, 0.51))
    count = chance.choice((30, 33, 60))
    ranks = []
    for _ in range(num_ranks):
        lines = []
        for number in range(count):
            factor = (1 + chance.uniform(-noise, noise)) * (10 if chance.random() < 0.05 else 1)
            own = {"forward_s": 0.003 * factor, "backward_s": 0.005 * factor, "exposed_s": 0.001 * chance.random()}
            total_s = sum(own.values()) + 0.002
            wait_s = waits * total_s * (1 + chance.uniform(-0.2, 0.2)) / (1 - waits)
            whole_s = total_s + wait_s
            times = {"core_wait_s": wait_s, "total_s": whole_s, "interval_s": whole_s}
            lines.append(step_line(number, samples=batch, **own, **times))
        machine = {"kind": "machine", "time": lines[0]["time"], "cpu_percent": 50.0, "host_cpu_percent": 60.0}
        machine |= {
            "core_wait_percent": 100 * waits * chance.uniform(0.9, 1.1),
            "steal_percent": chance.choice((0, 150)),
        }
        ranks.append([*lines, machine, machine])
    return view_run(write_run(folder / f"{chance.random()}", ranks, [session(num_ranks, global_batch_size=batch)]))


def read_speed(text):
    """Return the rate, the seconds of a step, and the error of both by rounding, as a share."""
    rate, amount, unit = re.search(r"trains ([\d,.]+) samples/s.*?, ([\d.]+) (ms|s) a step", text).groups()
    step = float(amount)
    digits = len(amount.partition(".")[2])
    error = 0.5 * 10**-digits / step + 0.5 / float(rate.replace(",", ""))
    return float(rate.replace(",", "")), step / (1000 if unit == "ms" else 1), error


@random_tables(40)
def test_no_sentence_of_report_contradicts_another(chance, tmp_path):
    view = random_run(tmp_path, chance, chance.choice((1, 2, 3)))
    texts = report_sentences(view)
    rate, step_s, error = read_speed(texts[0])
    batch = view.run.zero.steps[0].samples
    assert rate * step_s == pytest.approx(batch, rel=error + 1e-6), texts[0]
    # One share that waits for a core, wherever it is written: in the sentences, in the advice, in notes of plots.
    everything = " ".join([*texts, *(advice.text for advice in view.advice), *draw(view)])
    everything += " ".join(ranks_table(view).columns)
    shares = re.findall(r"(\d+)% (?:is )?waiting for a core|wait for a core during (\d+)%", everything)
    shares += [(percent, "") for percent in re.findall(r"aiting for a core \((\d+)%", everything)]
    percents = {first or second for first, second in shares}
    critical = view.figures.critical
    assert percents <= {f"{critical.share('core_wait'):.0%}"[:-1]}, percents
    assert "waiting for a core, %" not in everything
    # The bar on top has the same share.
    bar = re.search(r"(?:critical|rank 0) ([\d.]+) \(.*?waiting for a core ([\d.]+)", "".join(draw(view)))
    assert percent_of(float(bar[2]) / float(bar[1])) == pytest.approx(percent_of(critical.share("core_wait")), abs=0.3)
    # The parts are named with what they add up to.
    if computing := re.search(r"Of a step, (\d+)% is computing.*?: (.*?)(?:;|\.$)", texts[1]):
        assert int(computing[1]) == sum(map(int, re.findall(r"(\d+)%", computing[2])))
    # "Change first" is the largest gain of those that keep the run.
    gains = [advice.gain for advice in view.advice if advice.keeps_run]
    assert gains == sorted(gains, reverse=True)
    assert texts[2].startswith("No change") == (not view.advice)


@random_tables(60)
def test_no_factor_between_runs_without_quiet_machines_of_equal_lengths(chance, tmp_path):
    runs = [random_run(tmp_path, chance, num_ranks) for num_ranks in (2, 1)]
    found = compare_with_baseline(*runs)
    text = report_sentences(runs[0], [found])[0]
    assert found.scaling in text
    waits = [round(percent_of(run.figures.critical.share("core_wait")), 6) for run in runs]
    lengths = [sum(line.samples for line in run.run.zero.steps) for run in runs]
    comparable = max(waits) < 10 and min(lengths) >= 0.9 * max(lengths)
    factor = re.search(r"([\d.]+) times as fast as one device, (\d+)% of linear", found.scaling)
    assert bool(factor) == comparable, (found.scaling, waits, lengths)
    if factor:
        (mine, _, error), (other, _, other_error) = (read_speed(report_sentences(run)[0]) for run in runs)
        assert float(factor[1]) == pytest.approx(mine / other, rel=error + other_error, abs=0.005)
        assert abs(percent_of(float(factor[1]) / 2) - int(factor[2])) <= 0.5 + 1e-6
    else:
        assert found.scaling.startswith("its speed is not compared with that of one device, as ")
        for percent in re.findall(r"waited (\d+)% of a step for a core", found.scaling):
            assert int(percent) >= 10
        for numbers in re.findall(r"this run has ([\d,]+) samples, that one ([\d,]+)", found.scaling):
            assert [int(each.replace(",", "")) for each in numbers] == lengths


# --- tune -------------------------------------------------------------------------------------------------------------


@random_tables(40)
def test_no_sentence_of_tune_contradicts_a_row(chance, monkeypatch):
    noise, is_late = chance.choice((0.0, 0.002, 0.05)), chance.random() < 0.2

    def rounds_of(function, *args, devices, timeout_s):
        if function is tuning.probe:
            return [((), chance.choice((0.0, 0.5)))]
        num_rounds = 3 if is_late and chance.random() < 0.5 else chance.choice((8, 9))
        speeds = {name: chance.choice((0.9, 1.0, 1.004, 1.006, 1.014, 1.016, 1.3)) for name in args[0].arms}
        speeds[tuning.NOW] = 1.0
        noisy = {
            name: [(1 + chance.uniform(-noise, noise)) / speed for _ in range(num_rounds)]
            for name, speed in speeds.items()
        }
        return [noisy]

    monkeypatch.setattr(tuning, "run_ranks", rounds_of)
    monkeypatch.setattr("torch.get_num_threads", lambda: 4)
    sweep = tuning.tune(make_task(), allow_precision=True)
    kept = [result for result in sweep.results if not result.why]
    for result in sweep.results:
        ratio = result.ratio
        shown = [float(f"{value:.2f}") for value in (ratio.median, ratio.low, ratio.high)]
        assert shown == [ratio.median, ratio.low, ratio.high]
        if result.why == "":
            assert shown[0] >= tuning.WORTH and shown[1] > 1.0 and result.num_rounds >= 5
            stage = [
                each for each in sweep.results if each.stage == result.stage and each.why in ("", "another was better")
            ]
            assert ratio.median == max(each.ratio.median for each in stage)
        if result.why == "slower":
            assert shown[2] < 1.0
        if result.why == "within the noise":
            assert shown[1] <= 1.0 <= shown[2]
    together = [result for result in sweep.results if result.stage == tuning.TOGETHER]
    verdict = sweep.verdict
    if verdict.startswith("No allowed change is clearly faster"):
        assert kept == []
    elif verdict.startswith("No change is kept"):
        assert together[0].why and sweep.found == sweep.start
    elif total := re.match(r"All changes together: ([\d.]+) times", verdict):
        assert float(total[1]) == together[0].ratio.median >= tuning.WORTH
    else:
        assert verdict.startswith("The total gain was not measured")
        assert together[0].num_rounds < 5


# --- doctor -----------------------------------------------------------------------------------------------------------


@random_tables(30)
def test_the_verdict_of_doctor_counts_the_findings_and_agrees_with_the_pages_on_its_exit_code(chance):
    severities = [chance.choice((*Severity, Severity.NOTE)) for _ in range(chance.randint(0, 4))]
    findings = tuple(Finding("a", each, "", "", "") for each in severities)
    found = Examination(Plan(2), "here", {}, findings, ())
    counts = {text: severities.count(severity) for severity, text in WORDS.items() if severity in severities}
    assert {
        text: int(number) for number, text in re.findall(rf"(\d+) ({'|'.join(WORDS.values())})", found.verdict)
    } == counts
    table = re.findall(r"^\| (.+?) \| .* \| ([01]) \|$", (DOCS / "reference" / "doctor.md").read_text(), re.MULTILINE)
    assert found.exit_code == max((int(dict(table)[text]) for text in counts), default=0)
    assert found.exit_code == int(found.verdict.startswith("Found"))
    verify = (DOCS / "verify.md").read_text()
    assert "The exit code is 1 if something will hang, falsify or slow the run, 0 if there are only notes." in verify
    assert json.loads(found.to_json())["exit_code"] == found.exit_code
