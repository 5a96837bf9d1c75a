"""The reproduction's figures show what their comparison has, and nothing is cut off."""

import math

from maxgain.study.comparing import records
from maxgain.study.reproduce import figures, paper
from maxgain.study.reproduce.experiments import EXPERIMENTS
from maxgain.study.reproduce.running import Recorded
from maxgain.study.reproduce.state import look
from reproduce_records import failure_of, finish, tune

CIFAR10 = EXPERIMENTS["cifar10"]


def without_maxgain(results):
    """The comparison of a table in which every run of `maxgain` failed."""
    lost = {("maxgain", seed) for seed in range(5)}
    tune(CIFAR10, results)
    finish(CIFAR10, results, lambda row: 0.9, but=lost)
    for job in look(CIFAR10, Recorded.read(results)).final.missing:
        for finished in ("at 1", "at 2"):
            records.append(results, failure_of(job, finished=finished))
    return look(CIFAR10, Recorded.read(results)).comparison


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_forest_plot_has_both_intervals_and_the_papers_value_even_where_ours_is_missing(tmp_path):
    comparison = without_maxgain(tmp_path)
    figure = figures.contrasts(comparison, paper.CIFAR10)
    kinds = ["too small to matter, ±0.5", "the paper", "95 % together", "90 % alone", "ours"]
    assert sorted(legend(figure)) == sorted(kinds), "each once"
    lines = {label: [line for line in figure.axes[0].lines if line.get_label() == label] for label in kinds}
    assert [line.get_ydata()[0] for line in lines["the paper"]] == [0, 1, 2, 3]
    assert [line.get_ydata()[0] for line in lines["ours"]] == [1, 2, 3]
    narrow, wide = lines["90 % alone"][0].get_xdata(), lines["95 % together"][0].get_xdata()
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_rows_are_in_the_papers_order_and_the_outer_ones_are_not_cut_off(tmp_path):
    panel = figures.rows(without_maxgain(tmp_path), paper.CIFAR10).axes[0]
    assert [label.get_text().partition("\n")[0] for label in panel.get_yticklabels()] == list(paper.CIFAR10)
    assert panel.get_ylim() == (7.5, -0.5), "the first row at the top, and room for its marks"


def test_promise_20_figures_say_k_of_n_and_no_line_runs_through_a_run_that_failed(tmp_path):
    comparison = without_maxgain(tmp_path)
    panels = [figures.rows(comparison, {}).axes[0], figures.contrasts(comparison, {}).axes[0]]
    labels = [[label.get_text() for label in panel.get_yticklabels()] for panel in panels]
    assert [text for text in labels[0] + labels[1] if "of" in text] == ["maxgain\n0 of 5", "maxgain : none\n0 of 5"]
    lost = list(paper.CIFAR10).index("maxgain")
    joined = [line for line in panels[0].lines if line.get_marker() == "None"]
    assert len(joined) == 5
    assert all(math.isnan(line.get_xdata()[lost]) for line in joined)


def test_numbers_that_were_tried_close_together_do_not_run_into_each_other(tmp_path):
    tune(CIFAR10, tmp_path)
    tune(EXPERIMENTS["lipschitz"], tmp_path, best=30.0)
    panel = figures.choices(look(EXPERIMENTS["lipschitz"], Recorded.read(tmp_path))).axes[0]
    shown = [label.get_text() for label in panel.get_xticklabels() if label.get_text()]
    assert shown == ["1.25", "2", "3", "4", "6", "8", "12", "20", "33", "55", "90"]


def test_rows_of_which_no_number_was_tried_are_not_in_the_legend(tmp_path):
    tune(CIFAR10, tmp_path)
    figure = figures.choices(look(EXPERIMENTS["lipschitz"], Recorded.read(tmp_path)))
    assert legend(figure) == ["maxgain"], "whose search the two tables share"
    assert figure.axes[0].get_xlabel().startswith("γ;")
