"""maxgain reproduce: what would run, what is running, and what is left."""

from dataclasses import replace
from functools import partial

import pytest

from maxgain.errors import RunError
from maxgain.study.cli import reproduce as command
from maxgain.study.cli.app import main
from maxgain.study.comparing import records
from maxgain.study.comparing.jobs import Pairing
from maxgain.study.comparing.records import Records
from maxgain.study.recipes import recipe_named
from maxgain.study.reproduce import estimate, running
from maxgain.study.reproduce.experiments import EXPERIMENTS, TUNING_SEED
from maxgain.study.reproduce.running import Stage
from maxgain.study.runs import TUNING, Place, perform
from maxgain.study.training import DivergedError
from one_process import in_this_process
from reproduce_records import failure_of, finish, record_of, tune


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_dry_run_tells_what_would_run_and_writes_nothing(tmp_path, capsys):
    assert main(["reproduce", "cifar10", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "20 runs, and no record of one like them" in said
    assert "40 runs" in said
    assert "cifar10-maxgain=1.25-seed1000" in said
    assert not list(tmp_path.iterdir())


def test_a_dry_run_tells_how_long_by_what_runs_like_them_took(tmp_path, capsys):
    tune(EXPERIMENTS["cifar10"], tmp_path / "results")
    assert main(["reproduce", "cifar10", "--dry-run", "--per-gpu", "4"]) == 0
    # A run took 60 s of 140 epochs: 40 of them, four at a time, take 600 s.
    said = capsys.readouterr().out
    assert (
        "40 runs, about 10 minutes of training with 4 at a time, if they take as long as those recorded on Ima" in said
    )


def test_rows_without_numbers_are_known_before_the_others_are_chosen(tmp_path, capsys):
    """`none` is a run of the table too: what is recorded of it is neither listed nor counted again."""
    job = next(job for job in EXPERIMENTS["lipschitz"].final() if job.row == "none")
    records.append(tmp_path / "there", record_of(job))
    assert main(["reproduce", "lipschitz", "--dry-run", "--results", "there"]) == 0
    said = capsys.readouterr().out
    assert "final: 14 runs" in said
    assert job.name not in said
    assert "cifar10-none-seed1\n" in said
    assert "maxgain, seed 0, its numbers still to be chosen" in said
    assert "next: maxgain reproduce lipschitz --results there  #" in said
    assert main(["reproduce", "--results", "there"]) == 0
    assert "| none | 88.29 | 1 of 3 |" in (tmp_path / "REPRODUCTION.md").read_text()


def test_a_run_is_expected_to_take_as_long_as_others_of_its_row():
    slow, quick = (
        job for job in EXPERIMENTS["cifar10"].final() if job.recipe.seed == 0 and job.row in ("dropout", "none")
    )
    runs = [record_of(slow, seconds=400.0), record_of(quick, seconds=100.0)]
    assert [estimate.seconds(job, runs) for job in (slow, quick)] == pytest.approx([400, 100])
    other = next(job for job in EXPERIMENTS["cifar10"].final() if job.row == "maxgain")
    assert estimate.seconds(other, runs) == pytest.approx(250), "no run of its row: the middle of its recipe's"
    assert estimate.seconds(EXPERIMENTS["sins10"].final()[0], runs) is None


def test_without_a_name_the_document_is_made_and_everything_is_listed(tmp_path, capsys):
    tune(EXPERIMENTS["cifar10"], tmp_path / "results")
    assert main(["reproduce"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in EXPERIMENTS)
    assert "0 of 40 runs done" in said
    assert (tmp_path / "REPRODUCTION.md").exists()


@pytest.mark.parametrize("name", ["page.md", "page"])
def test_the_document_is_made_again_whatever_it_is_called_and_another_file_is_left_alone(name, tmp_path, capsys):
    for _ in range(2):
        assert main(["reproduce", "--document", name]) == 0
    (tmp_path / name).write_text("mine")
    assert main(["reproduce", "--document", name]) == 2
    assert "maxgain did not write it" in capsys.readouterr().err
    assert (tmp_path / name).read_text() == "mine"


def test_an_experiment_with_nothing_missing_runs_nothing_and_needs_no_data(tmp_path, capsys):
    results = tmp_path / "results"
    tune(EXPERIMENTS["cifar10"], results)
    finish(EXPERIMENTS["cifar10"], results, lambda row: 0.9)
    lines = (results / "cifar10.jsonl").read_text()
    assert main(["reproduce", "cifar10", "--device", "cpu", "--data", str(tmp_path / "nowhere")]) == 0
    assert (results / "cifar10.jsonl").read_text() == lines
    capsys.readouterr()
    assert main(["reproduce", "cifar10", "--dry-run"]) == 0
    assert "nothing is left to run" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["cifar11"], ["cifar10", "--minutes", "0"], ["cifar10", "--per-gpu", "0"]])
def test_nonsense_is_answered_with_a_sentence(arguments, capsys):
    assert main(["reproduce", *arguments]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_numbers_are_chosen_with_a_seed_that_no_final_run_has():
    for experiment in EXPERIMENTS.values():
        if experiment.pairing.over == "seed":
            assert {job.recipe.seed for job in experiment.tuning()} <= {TUNING_SEED}
            assert TUNING_SEED not in {job.recipe.seed for job in experiment.final()}


def test_runs_that_choose_see_no_validation_image_in_training_and_final_ones_do():
    for experiment in EXPERIMENTS.values():
        assert {job.recipe.train_on for job in experiment.tuning()} <= {"train"}
        assert {job.recipe.train_on for job in experiment.final()} <= {"train+validation"}


def test_svhn_takes_the_papers_number_of_steps_without_extra():
    recipe = EXPERIMENTS["svhn"].recipe
    paper, ours = 17 * (594_388 // 100), recipe.epochs * (73_257 // 100)
    assert ours == pytest.approx(paper, rel=1e-3)
    assert recipe.milestones[0] / recipe.epochs == pytest.approx(15 / 17, abs=0.5 / recipe.epochs)


def test_every_tuned_row_has_the_same_budget():
    for experiment in EXPERIMENTS.values():
        counts = [sum(job.row == row for job in experiment.tuning()) for row in experiment.rows]
        assert len(set(counts) - {0}) <= 1


def test_lipschitz_shares_the_runs_of_the_table_that_it_is_compared_with():
    table, rows = ({job.key for job in EXPERIMENTS[name].tuning()} for name in ("cifar10", "lipschitz"))
    assert len(table & rows) == 5


def test_what_cannot_be_had_is_not_the_next_thing_to_run(capsys, monkeypatch):
    monkeypatch.setattr(command, "EXPERIMENTS", {"cifar100": EXPERIMENTS["cifar100"]})
    assert main(["reproduce"]) == 0
    assert "next:" not in capsys.readouterr().out
    assert main(["reproduce", "cifar100", "--dry-run"]) == 0
    assert "next: maxgain reproduce cifar100" in capsys.readouterr().out, "whoever asks for it may have the data"


def test_a_search_goes_on_on_another_machine_that_has_the_records(tmp_path, capsys):
    for job in EXPERIMENTS["cifar10"].tuning()[:19]:
        records.append(tmp_path / "results" / TUNING, record_of(job, has_test=False))
    assert main(["reproduce", "cifar10", "--dry-run"]) == 0
    assert "tuning: 1 run," in capsys.readouterr().out


def test_a_run_that_fails_is_tried_once_more_and_then_counts_as_failed(tmp_path, monkeypatch):
    stage = Stage("final", tuple(EXPERIMENTS["gains"].final()[:3]), records.read(tmp_path))
    tried = []

    def run_one(work, jobs, at_once, device):
        for number, job in enumerate(jobs):
            tried.append(job.row)
            works = job.row == "none" and number == 0
            records.append(tmp_path, record_of(job) if works else failure_of(job, finished=f"at {len(tried)}"))
            yield job, {}

    monkeypatch.setattr(running, "side_by_side", run_one)
    identified = running.by_records(Records((record_of(stage.jobs[0]),), (), ()))(stage.jobs)
    stage = replace(stage, jobs=tuple(identified))
    place = replace(Place(tmp_path), records=tmp_path)
    running.run_missing(stage, place, running.Budget(None), 1, lambda job, record, seconds: None)
    # The second try of 'none' with seed 1 comes first in its round, and works.
    assert tried == ["none", "maxgain=2", "none", "maxgain=2", "none"]


def test_failures_are_counted_once_however_often_their_line_is_copied(tmp_path):
    job = EXPERIMENTS["gains"].final()[0]
    for finished in ("at 1", "at 1", "at 2"):
        records.append(tmp_path, failure_of(job, finished=finished))
    (failures,) = records.read(tmp_path).failures.values()
    assert [failure["finished"] for failure in failures] == ["at 1", "at 2"]


def test_records_that_say_nothing_but_scores_are_enough_for_a_dry_run(tmp_path, capsys):
    experiment = EXPERIMENTS["cifar10"]
    for job in experiment.tuning()[:3]:
        run = record_of(job, has_test=False)
        records.append(
            tmp_path / TUNING, {name: run[name] for name in run if name not in ("seconds", "device", "epochs")}
        )
    assert main(["reproduce", "cifar10", "--dry-run", "--results", str(tmp_path)]) == 0
    assert "no record of one like them" in capsys.readouterr().out


def test_what_a_machine_ended_is_no_attempt_and_is_tried_again(tmp_path):
    job = EXPERIMENTS["gains"].final()[0]
    for number in range(4):
        records.append(tmp_path, failure_of(job, finished=f"at {number}", fault="machine"))
    key = record_of(job)["key"]
    assert records.read(tmp_path).attempts(key) == 0
    for number in range(4, 6):
        records.append(tmp_path, failure_of(job, finished=f"at {number}", fault="training"))
    assert records.read(tmp_path).attempts(key) == 2


TINY = replace(
    EXPERIMENTS["gains"],
    name="tiny",
    recipe=replace(recipe_named("digits"), network="mlp", epochs=1, batch_size=256),
    rows=("none", "dropout"),
    pairing=Pairing("seed", (0,)),
    contrasts=("dropout:none",),
)


def run_tiny(monkeypatch, perform):
    """`maxgain reproduce tiny` in this process, in which a run is what `perform` makes of it; its exit code."""
    monkeypatch.setitem(EXPERIMENTS, "tiny", TINY)
    in_this_process(monkeypatch)
    monkeypatch.setattr(running.many, "run_recorded", partial(running.many.run_recorded, perform=perform))
    return main(["reproduce", "tiny", "--device", "cpu"])


@pytest.mark.parametrize(("error", "tries"), [(RunError("the disk is full."), 8), (DivergedError("it is nan."), 4)])
def test_promise_21_it_does_not_end_well_if_nothing_succeeded_and_a_full_disk_is_no_result(
    error, tries, capsys, monkeypatch
):
    tried = []

    def fails(recipe, *rest, **options):
        tried.append(recipe.regulariser)
        raise error

    assert run_tiny(monkeypatch, fails) == 2
    assert f"no run succeeded; the last one, of dropout: {error}" in capsys.readouterr().err
    assert tried == ["none", "dropout", "none", "dropout"]
    run_tiny(monkeypatch, fails)
    assert len(tried) == tries


def test_promise_21_runs_that_failed_are_counted_last(capsys, monkeypatch):
    def fails_once(recipe, *rest, **options):
        if recipe.regulariser == "none":
            raise DivergedError("it is nan.")
        return perform(recipe, *rest, **options)

    assert run_tiny(monkeypatch, fails_once) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("2 of 3 runs failed")


@pytest.mark.parametrize(
    ("flag", "said"), [("--results", "Not a directory"), ("--document", "maxgain did not write it")]
)
def test_what_cannot_be_written_is_said_before_anything_is_trained(flag, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "stages", lambda *options: pytest.fail("training has begun"))
    (tmp_path / "mine.md").write_text("mine")
    place = {"--results": "mine.md/in it", "--document": "mine.md"}[flag]
    assert main(["reproduce", "gains", flag, place]) == 2
    assert said in capsys.readouterr().err
    assert (tmp_path / "mine.md").read_text() == "mine"
