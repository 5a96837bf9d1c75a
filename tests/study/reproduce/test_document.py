"""The document says what the records say: no more before all runs are done, and nothing of its own after."""

import re
from pathlib import Path

import pytest

from maxgain.errors import MaxGainError
from maxgain.study.comparing import records
from maxgain.study.recipes import run_key
from maxgain.study.reproduce import paper
from maxgain.study.reproduce.document import MARK, build, written
from maxgain.study.reproduce.experiments import EXPERIMENTS
from maxgain.study.reproduce.running import Recorded
from maxgain.study.reproduce.state import deviation, look
from maxgain.study.runs import TUNING
from reproduce_records import failure_of, finish, record_of, tune

ROOT = Path(__file__).parents[3]
CIFAR10 = EXPERIMENTS["cifar10"]


def made(folder):
    """The text of the document of the records in a folder, whose figures are not drawn."""
    recorded = Recorded.read(folder / "results")
    states = {name: look(experiment, recorded) for name, experiment in EXPERIMENTS.items()}
    return written(states, "results/figures")[0]


def section(text, title):
    """What the document says under a heading."""
    return text.partition(f"\n## {title}")[2].partition("\n## ")[0]


def as_in_the_paper(row):
    """The paper's accuracy of a row, as a fraction."""
    return paper.CIFAR10[row.partition("=")[0]].accuracy / 100


def test_the_documents_in_the_tree_are_what_the_records_in_it_say(tmp_path):
    build(ROOT / "results", tmp_path / "REPRODUCTION.md")
    text = (tmp_path / "REPRODUCTION.md").read_text(encoding="utf-8")
    linked = re.sub(r"\]\([^)]*?results/figures/", "](results/figures/", text)
    assert linked == (ROOT / "REPRODUCTION.md").read_text(encoding="utf-8"), "run 'maxgain reproduce' in the root"


def test_without_any_record_every_claim_is_not_run_and_has_its_command(tmp_path):
    text = made(tmp_path)
    lines = [line for line in text.splitlines() if line.startswith("| ") and "`maxgain reproduce" in line]
    assert all(line.endswith("| not run | not run |") for line in lines)
    assert {re.search(r"`maxgain reproduce (\S+)`", line)[1] for line in lines} == set(EXPERIMENTS)


def test_records_that_contradict_each_other_are_named_in_the_document(tmp_path):
    tune(CIFAR10, tmp_path / "results")
    finish(CIFAR10, tmp_path / "results", as_in_the_paper)
    assert "About the records" not in made(tmp_path)
    again = records.read(tmp_path / "results").runs[0] | {"test_accuracy": 0.99}
    records.append(tmp_path / "results", again)
    doubts = made(tmp_path).partition("About the records:\n\n")[2].partition("\n\n")[0]
    assert re.fullmatch(r"- .*cifar10\.jsonl: 1 run is recorded more than once, with scores that differ; .*\.", doubts)


def test_a_search_that_is_not_over_shows_what_was_tried_and_chooses_nothing(tmp_path):
    for job in CIFAR10.tuning()[:3]:
        records.append(tmp_path / "results" / TUNING, record_of(job, 0.8 + job.chosen["maxgain"] / 100, has_test=False))
    text = section(made(tmp_path), "CIFAR-10, VGG-19")
    assert "choosing numbers: 3 of 20 runs done" in text
    assert "| maxgain | 1.25: 81.25, 1.5: 81.50, 2: 82.00 | not yet (2 leads) |" in text


def test_no_test_score_is_shown_before_all_runs_of_a_table_are_done(tmp_path):
    results = tmp_path / "results"
    tune(CIFAR10, results)
    finish(CIFAR10, results, lambda row: 0.87654, but={("none", 4)})
    text = made(tmp_path)
    assert "39 of 40 runs done; scores are looked at when all are" in text
    assert "| none | 88.29 | 4 of 5 |" in text
    assert "87.6" not in text
    assert "-rows.svg" not in text


def test_a_finished_table_is_what_its_comparison_says(tmp_path):
    results = tmp_path / "results"
    tune(CIFAR10, results)
    finish(CIFAR10, results, as_in_the_paper)
    comparison = look(CIFAR10, Recorded.read(results)).comparison
    text = made(tmp_path)
    for row in comparison.rows:
        shown = f"{100 * row.summary.mean:.2f} ± {100 * row.summary.standard_error:.2f} (5 of 5)"
        label = row.name.replace("maxgain", "maxgain=2")
        assert re.search(rf"\| {re.escape(label)} \| {paper.CIFAR10[row.name]} \| {re.escape(shown)} \|", text)
    first = comparison.contrasts[0]
    assert (first.first, first.second, first.verdict) == ("maxgain", "none", "established")
    low, high = (100 * end for end in first.decided.interval_90)
    assert f"| +2.46 | {100 * first.decided.mean:+.2f} (5 of 5) | {low:+.2f} to {high:+.2f} |" in text
    assert "| H1: CIFAR-10: maxgain against none |" in text
    assert text.count("**established**, p < 0.001") >= 1


def test_figures_are_drawn_beside_the_records_and_linked(tmp_path):
    results, document = tmp_path / "results", tmp_path / "REPRODUCTION.md"
    tune(CIFAR10, results)
    finish(CIFAR10, results, as_in_the_paper)
    files = build(results, document)
    names = {"cifar10-rows", "cifar10-contrasts", "cifar10-tuning", "gains-none", "gains-maxgain", "lipschitz-tuning"}
    assert {file.stem for file in files[1:]} == names
    text = document.read_text(encoding="utf-8")
    for file in files[1:]:
        assert f"](results/figures/{file.name})" in text
        assert file.read_bytes().startswith(b"<?xml")


def test_the_verdicts_follow_the_plan(tmp_path):
    tune(CIFAR10, tmp_path / "results")
    finish(CIFAR10, tmp_path / "results", as_in_the_paper)
    comparison = look(CIFAR10, Recorded.read(tmp_path / "results")).comparison
    assert comparison.question.decide_by == "pooled"
    assert comparison.question.rope == 0.005
    assert comparison.tested == len(comparison.contrasts) == 4
    assert [contrast.second for contrast in comparison.contrasts] == [
        "none",
        "dropout",
        "batchnorm",
        "batchnorm+dropout",
    ]


def test_an_expectation_that_fails_is_reported_as_failing(tmp_path):
    tune(CIFAR10, tmp_path / "results")
    finish(CIFAR10, tmp_path / "results", lambda row: as_in_the_paper(row) - 0.01)
    text = made(tmp_path)
    lowest = r"the lowest is [a-z+]+, -\d.\d\d from the paper's"
    assert re.search(rf"within 0.4 points .* 0 of 8 rows; {lowest} \| \*\*does not hold\*\* \|", text)
    assert re.search(r"reaches 92.5 % .* \*\*does not hold\*\* \|", text)


def test_gains_are_beside_the_papers_and_a_tables_runs_serve_for_them(tmp_path):
    results, gains = tmp_path / "results", EXPERIMENTS["gains"]
    tune(CIFAR10, results, best=2.0)
    finish(CIFAR10, results, as_in_the_paper)
    state = look(gains, Recorded.read(results))
    assert state.is_complete, "none and maxgain at γ = 2 are rows of the table"
    text = section(made(tmp_path), "Figures 1 and 2")
    assert text.count("\n| 19 | ") == 2
    off = deviation(state.gains("none", "test"), paper.GAINS["none"]["test"])
    assert f"{100 * off:.1f} % off, averaged over layers (5 of 5 runs)" in made(tmp_path)


def test_the_deviation_of_medians_is_relative_without_sign_and_averaged():
    theirs = [(0.0, 1.0, 2.0, 3.0, 4.0), (0.0, 1.0, 4.0, 5.0, 6.0)]
    ours = [(0.0, 1.0, 2.2, 3.0, 9.0), (0.0, 1.0, 3.2, 5.0, 6.0)]
    assert deviation(ours, theirs) == pytest.approx((0.1 + 0.2) / 2)


@pytest.mark.parametrize(
    ("losses", "seen"), [((3, 2, 1, 1, 2, 3, 4, 5), "**seen**"), ((8, 7, 6, 5, 4, 3, 2, 1), "**not seen**")]
)
def test_the_gamma_curve_is_seen_where_its_least_validation_loss_lies_inside(tmp_path, losses, seen):
    curve = EXPERIMENTS["gamma-curve"]
    for job, loss in zip(curve.tuning(), losses, strict=True):
        run = record_of(job, has_test=False, validation_loss=0.1 * loss, train_loss=1 / job.chosen["maxgain"])
        records.append(tmp_path / "results" / TUNING, run)
    text = made(tmp_path)
    assert re.search(rf"\| Figure 3: .* \(8 of 8 runs\) \| {re.escape(seen)}, one run per γ \|", text)
    assert "](results/figures/gamma-curve.svg)" in text


def test_promise_20_the_shape_of_the_gamma_curve_does_not_rest_on_the_survivors(tmp_path):
    *others, last = EXPERIMENTS["gamma-curve"].tuning()
    for number, job in enumerate(others):  # the loss falls to the end of what is left
        run = record_of(job, has_test=False, validation_loss=1 - 0.1 * number, train_loss=1 / job.chosen["maxgain"])
        records.append(tmp_path / "results" / TUNING, run)
    for finished in ("at 1", "at 2"):
        records.append(tmp_path / "results" / TUNING, failure_of(last, finished=finished))
    assert re.search(
        r"\| Figure 3: .* \(7 of 8 runs; 1 failed\) \| \*\*not settled\*\*, as runs failed \|", made(tmp_path)
    )


def test_runs_of_the_gamma_curve_are_the_searches_of_the_table():
    curve, table = ({job.key for job in EXPERIMENTS[name].tuning()} for name in ("gamma-curve", "svhn"))
    assert len(curve) == 8
    assert len(curve & table) == 5


def test_folds_have_numbers_of_their_own(tmp_path):
    sins10, results = EXPERIMENTS["sins10"], tmp_path / "results"
    for job in sins10.tuning():
        wanted = (1.5, 2.0, 3.0, 4.0, 6.0)[job.recipe.fold % 5]
        run = record_of(job, 0.7 - 0.01 * abs(job.chosen["maxgain"] - wanted), has_test=False)
        records.append(results / TUNING, run)
    finish(sins10, results, lambda row: 0.7)
    text = section(made(tmp_path), "SINS-10's protocol")
    assert "| maxgain+batchnorm | 1.5 | 2 | 3 | 4 | 6 | 1.5 | 2 | 3 | 4 | 6 |" in text
    assert "paired t-test on disjoint folds" in text
    assert "Every fold has test images of its own" in text
    assert "ootstrap" not in text
    assert "above the paper" not in text, "the data are others"


def test_a_document_that_somebody_wrote_is_not_overwritten(tmp_path):
    (tmp_path / "REPRODUCTION.md").write_text("my own notes\n")
    with pytest.raises(MaxGainError, match="maxgain did not write it"):
        build(tmp_path / "results", tmp_path / "REPRODUCTION.md")
    assert (tmp_path / "REPRODUCTION.md").read_text() == "my own notes\n"


def test_the_same_records_make_the_same_bytes_and_a_document_is_made_again(tmp_path):
    results, document = tmp_path / "results", tmp_path / "REPRODUCTION.md"
    for job in EXPERIMENTS["gamma-curve"].tuning():
        records.append(results / TUNING, record_of(job, has_test=False))
    first = [file.read_bytes() for file in build(results, document)]
    assert [file.read_bytes() for file in build(results, document)] == first
    assert first[0].startswith(MARK.encode())


def test_records_of_another_machine_are_merged_by_appending_its_lines(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    for machine in (here, there):
        tune(CIFAR10, machine / "results")
    half = {("none", seed) for seed in range(5)} | {("maxgain", seed) for seed in range(5)}
    everything = {(row, seed) for row in CIFAR10.rows for seed in range(5)}
    finish(CIFAR10, here / "results", as_in_the_paper, but=half)
    finish(CIFAR10, there / "results", as_in_the_paper, but=everything - half)
    with (here / "results" / "cifar10.jsonl").open("a") as file:
        file.write((there / "results" / "cifar10.jsonl").read_text())
    whole = tmp_path / "whole"
    tune(CIFAR10, whole / "results")
    finish(CIFAR10, whole / "results", as_in_the_paper)
    assert made(here) == made(whole)


def test_promise_20_a_run_that_failed_twice_is_reported_as_k_of_n_and_nothing_rests_on_the_survivors(tmp_path):
    results = tmp_path / "results"
    tune(CIFAR10, results)
    finish(CIFAR10, results, as_in_the_paper, but={("maxgain", 3)})
    lost = next(job for job in look(CIFAR10, Recorded.read(results)).final.missing)
    records.append(results, failure_of(lost, finished="at 1"))
    assert "39 of 40 runs done" in made(tmp_path), "it is tried once more"
    records.append(results, failure_of(lost, finished="at 2"))
    text = made(tmp_path)
    assert re.search(r"\| maxgain=2 \| 90.75 \| 9\d.\d\d ± \d.\d\d \(4 of 5\) \|", text)
    assert "1 of 5 runs of maxgain failed" in text
    assert re.search(
        r"H1: .* 4 of 5 pairs \| \*\*inconclusive\*\*, as runs failed \(without them established, p < 0.001\)", text
    )
    assert re.search(r"0.4 points .* 7 of 8 rows; .* runs failed in maxgain \| \*\*not settled\*\*, as runs", text)
    assert re.search(r"expected: H1 .* \*\*not settled\*\*", text)
    assert re.search(
        r"Figure 1, maxgain=2: median gains on the test set .* \(4 of 5 runs\) \| \*\*not settled\*\*", text
    )
    assert "State: 39 of 40 runs; 1 failed." in text


def test_records_of_other_data_are_not_counted(tmp_path):
    results = tmp_path / "results"
    jobs = CIFAR10.tuning()
    for job in jobs[:4]:
        records.append(results / TUNING, record_of(job, has_test=False))
    other = record_of(jobs[4], has_test=False) | {"fingerprint": "0" * 64, "key": run_key(jobs[4].recipe, "0" * 64)}
    records.append(results / TUNING, other)
    assert "choosing numbers: 4 of 20 runs done" in made(tmp_path)


def test_a_reversed_contrast_is_not_what_was_expected_however_small_its_p(tmp_path):
    tune(CIFAR10, tmp_path / "results")
    finish(CIFAR10, tmp_path / "results", lambda row: 0.85 if row.startswith("maxgain") else 0.9)
    text = made(tmp_path)
    assert re.search(r"H1: .* \*\*reversed\*\*, p < 0.001 \|", text)
    assert re.search(r"expected: H1 is established .* reversed, p < 0.001 \| \*\*does not hold\*\* \|", text)


def test_a_row_for_which_nothing_could_be_chosen_shows_no_number(tmp_path):
    results = tmp_path / "results"
    for job in CIFAR10.tuning():
        if job.row == "maxgain+dropout" or (job.row, job.chosen["maxgain"]) == ("maxgain", 4.0):
            for finished in ("at 1", "at 2"):
                records.append(results / TUNING, failure_of(job, finished=finished))
        else:
            records.append(
                results / TUNING, record_of(job, 0.9 - 0.01 * abs(job.chosen["maxgain"] - 2), has_test=False)
            )
    finish_all_but = look(CIFAR10, Recorded.read(results)).final
    for job in finish_all_but.missing:
        records.append(results, record_of(job, as_in_the_paper(job.row)))
    text = section(made(tmp_path), "CIFAR-10, VGG-19")
    assert "| maxgain+dropout | 90.95 | no score, 0 of 5 runs | – |" in text
    assert re.search(r"\| maxgain\+dropout \| (\d.*: failed, )+4: failed \| none, as all runs failed \|", text)
    assert "3: 89.00, 4: failed | 2 |" in text
    assert re.search(r"H2: .* 0 of 5 pairs \| \*\*inconclusive\*\*, no test \|", made(tmp_path))
    assert "No bootstrap for " in text
    assert "- maxgain: 1 tuning run failed and had no say in its numbers." in text


def test_a_row_whose_search_is_over_is_chosen_while_others_are_still_tried(tmp_path):
    tune(CIFAR10, tmp_path / "results")
    finish(CIFAR10, tmp_path / "results", as_in_the_paper)
    text = section(made(tmp_path), "Lipschitz rows")
    assert "choosing numbers: 5 of 20 runs done" in text
    assert "| maxgain | 90.75 | 3 of 3 |" in text
    assert re.search(r"\| maxgain \| 1.25: .* \| 2 \|", text)
    assert "| lipschitz-1 | – | not yet |" in text


def test_a_choice_among_equals_or_at_an_end_of_the_grid_says_so(tmp_path):
    """The paper's rule: accuracy, then loss, then the smaller number."""
    losses = {"maxgain+dropout": {3.0: 0.1}}
    for job in CIFAR10.tuning():
        value = job.chosen["maxgain"]
        accuracy = 0.8 + value / 100 if job.row == "maxgain+batchnorm" else 0.8
        loss = losses.get(job.row, {}).get(value, 0.2)
        run = record_of(job, accuracy, has_test=False, validation_loss=loss)
        records.append(tmp_path / "results" / TUNING, run)
    text = section(made(tmp_path), "CIFAR-10, VGG-19")
    chosen = dict(re.findall(r"\| (maxgain\S*) \| 1.25: .* \| (.*) \|", text))
    assert chosen == {
        "maxgain": "1.25, smallest of equals, smallest tried",
        "maxgain+dropout": "3, by loss",
        "maxgain+batchnorm": "4, largest tried",
        "maxgain+batchnorm+dropout": "1.25, smallest of equals, smallest tried",
    }


def test_choices_at_an_end_of_the_grid_are_counted_over_folds(tmp_path):
    sins10, results = EXPERIMENTS["sins10"], tmp_path / "results"
    for job in sins10.tuning():
        wanted = 6.0 if job.row == "maxgain+batchnorm" and job.recipe.fold < 3 else 2.0
        run = record_of(job, 0.7 - 0.01 * abs(job.chosen["maxgain"] - wanted), has_test=False)
        records.append(results / TUNING, run)
    text = section(made(tmp_path), "SINS-10's protocol")
    assert "An end of what was tried was chosen for maxgain+batchnorm on 3 of 10 folds: a better number may" in text
    assert "did not decide" not in text


def test_ties_are_counted_over_folds(tmp_path):
    sins10, results = EXPERIMENTS["sins10"], tmp_path / "results"
    for job in sins10.tuning():
        equal = job.row == "maxgain+batchnorm" and job.recipe.fold < 4
        accuracy = 0.7 - (0 if equal else 0.01 * abs(job.chosen["maxgain"] - 3.0))
        run = record_of(job, accuracy, has_test=False, validation_loss=abs(job.chosen["maxgain"] - 3.0))
        records.append(results / TUNING, run)
    text = section(made(tmp_path), "SINS-10's protocol")
    assert "Accuracy alone did not decide for maxgain+batchnorm on 4 of 10 folds: another number had the same." in text


def test_a_gamma_curve_chooses_nothing_while_it_is_being_run(tmp_path):
    job = EXPERIMENTS["gamma-curve"].tuning()[1]  # which is no run of the table's search
    records.append(tmp_path / "results" / TUNING, record_of(job, has_test=False))
    assert "State: 1 of 8 runs done." in section(made(tmp_path), "Figure 3")


def test_a_gamma_curve_whose_losses_are_no_numbers_settles_nothing(tmp_path):
    for job in EXPERIMENTS["gamma-curve"].tuning():
        known = job.chosen["maxgain"] > 2.5
        run = record_of(job, has_test=False, **({} if known else {"validation_loss": None, "train_loss": None}))
        records.append(tmp_path / "results" / TUNING, run)
    assert re.search(
        r"Figure 3: .* too few losses that are numbers \(8 of 8 runs\) \| \*\*not settled\*\*", made(tmp_path)
    )


OPTIONAL = (
    "gain_quantiles",
    "max_gain",
    "seconds",
    "device",
    "epochs",
    "validation_images",
    "classes",
    "tuned",
    "history",
)


@pytest.mark.parametrize("dropped", [OPTIONAL, ("gain_quantiles",)])
def test_records_may_lack_all_that_their_schema_does_not_require(dropped, tmp_path):
    results = tmp_path / "results"
    for job in CIFAR10.tuning():
        run = record_of(job, 0.9 - 0.01 * abs(job.chosen["maxgain"] - 2), has_test=False)
        records.append(results / TUNING, {name: run[name] for name in run if name not in dropped})
    for job in look(CIFAR10, Recorded.read(results)).final.jobs:
        run = record_of(job, as_in_the_paper(job.row))
        records.append(results, {name: run[name] for name in run if name not in dropped})
    text = made(tmp_path)
    assert "State: 40 of 40 runs." in text
    assert ("took" in section(text, "CIFAR-10, VGG-19")) == ("seconds" not in dropped)
    assert text.count("| no gains, 0 of 5 runs | **not settled**, as records lack gains |") == 4


@pytest.mark.parametrize("spoilt", [None, float("inf")])
def test_a_run_whose_gains_are_no_numbers_or_of_another_network_is_not_averaged(spoilt, tmp_path):
    results, gains = tmp_path / "results", EXPERIMENTS["gains"]
    for number, job in enumerate(gains.final()):
        run = record_of(job, layers=12 if number == 0 else 19)
        if number == 2:
            next(iter(run["gain_quantiles"]["test"].values()))[4] = spoilt
        records.append(results, run)
    text = made(tmp_path)
    assert re.search(
        r"Figure 2, none: median gains on the test .* \(3 of 5 runs\) \| \*\*not settled\*\*, as records lack", text
    )
    assert re.search(
        r"Figure 2, none: median gains on the train .* \(4 of 5 runs\) \| \*\*not settled\*\*, as records lack", text
    )
    assert "nan" not in text


def exactly(folder, accuracies):
    """A table whose runs have these accuracies, by row, the same for every seed."""
    tune(CIFAR10, folder / "results")
    for job in look(CIFAR10, Recorded.read(folder / "results")).final.jobs:
        records.append(folder / "results", record_of(job, accuracies.get(job.row, as_in_the_paper(job.row) + 0.01)))


@pytest.mark.parametrize(
    ("best", "shown", "holds"),
    [(0.92499, "92.499", "does not hold"), (0.925, "92.50", "holds"), (0.92504, "92.504", "holds")],
)
def test_a_mean_is_not_rounded_across_what_was_expected_of_it(best, shown, holds, tmp_path):
    exactly(tmp_path, {"maxgain+batchnorm+dropout": best})
    assert f"reaches 92.5 % | `maxgain reproduce cifar10` | 91.52 | {shown} ± 0.00 (5 of 5) | **{holds}**" in made(
        tmp_path
    )


@pytest.mark.parametrize(
    ("below", "shown", "holds"),
    [(0.40, "-0.40", "holds"), (0.402, "-0.402", "does not hold"), (0.399, "-0.399", "holds")],
)
def test_a_row_is_not_rounded_to_where_it_would_be_near_enough(below, shown, holds, tmp_path):
    exactly(tmp_path, {"none": round(0.8829 - below / 100, 6)})
    assert re.search(
        rf"within 0.4 points .*; the lowest is none, {shown} from the paper's \| \*\*{holds}\*\*", made(tmp_path)
    )


def with_failures(folder, accuracy, failed):
    """A table in which the runs of these (row, seed) failed twice."""
    tune(CIFAR10, folder / "results")
    finish(CIFAR10, folder / "results", accuracy, but=failed)
    for job in look(CIFAR10, Recorded.read(folder / "results")).final.missing:
        for finished in ("at 1", "at 2"):
            records.append(folder / "results", failure_of(job, finished=finished))
    return made(folder)


def test_an_expectation_is_not_called_wrong_because_runs_failed(tmp_path):
    text = with_failures(tmp_path, as_in_the_paper, {("none", seed) for seed in range(5)})
    assert re.search(r"expected: H1 .* inconclusive, no test \| \*\*not settled\*\*, as runs failed", text)


def test_an_expectation_is_wrong_where_even_the_survivors_are_worse(tmp_path):
    text = with_failures(tmp_path, lambda row: 0.5 if row.startswith("maxgain") else 0.9, {("maxgain", 0)})
    assert re.search(r"expected: H1 .* reversed, p < 0.001 \| \*\*does not hold\*\*", text)
