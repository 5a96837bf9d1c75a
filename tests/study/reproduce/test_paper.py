"""The paper's numbers, against sums and values that were taken from its source by other means."""

import pytest

from maxgain.study.reproduce import paper
from maxgain.study.reproduce.experiments import EXPERIMENTS

SUMS = {  # of the columns of the source's tables
    ("none", "train"): (57.392568, 68.547851, 70.701293, 72.895347, 83.03521),
    ("none", "test"): (57.946451, 68.353834, 70.575342, 72.8603, 83.18439),
    ("maxgain", "train"): (24.509624, 30.73002, 31.82739, 32.94157, 37.48803),
    ("maxgain", "test"): (23.830011, 30.37597, 31.72587, 32.90865, 37.14858),
}


@pytest.mark.parametrize(("row", "part"), SUMS)
def test_figures_1_and_2_have_nineteen_layers_of_ordered_quantiles(row, part):
    boxes = paper.GAINS[row][part]
    assert len(boxes) == 19
    assert all(list(box) == sorted(box) for box in boxes)


@pytest.mark.parametrize(("row", "part"), SUMS)
def test_figures_1_and_2_add_up(row, part):
    sums = [sum(column) for column in zip(*paper.GAINS[row][part], strict=True)]
    assert sums == pytest.approx(SUMS[row, part], abs=1e-6)


def test_under_gamma_2_gains_hardly_exceed_it():
    assert max(box[4] for box in paper.GAINS["maxgain"]["train"]) == 2.00625
    assert max(box[4] for box in paper.GAINS["maxgain"]["test"]) == 2.00058


def test_tables_add_up():
    tables = (paper.CIFAR10, paper.CIFAR100, paper.SVHN, paper.SINS10)
    sums = [sum(number.accuracy for number in table.values()) for table in tables]
    assert sums == pytest.approx([724.68, 303.39, 779.94, 290.39])
    assert sum(number.standard_error for number in paper.SINS10.values()) == pytest.approx(1.81)
    assert sum(n.accuracy for table in paper.LIPSCHITZ.values() for n in table.values()) == pytest.approx(669.89)


def test_figure_3_goes_in_quarters_and_peaks_at_a_gamma_of_1_75():
    curve = paper.GAMMA_CURVE
    assert curve.gammas == tuple(1.25 + 0.25 * step for step in range(8))
    assert [sum(getattr(curve, f"{part}_accuracy")) for part in ("train", "test")] == pytest.approx([794.66, 773.54])
    assert [sum(getattr(curve, f"{part}_loss")) for part in ("train", "test")] == pytest.approx([0.2210, 1.2818])
    best = curve.gammas[curve.test_accuracy.index(max(curve.test_accuracy))]
    assert best == curve.gammas[curve.test_loss.index(min(curve.test_loss))] == 1.75
    assert max(curve.test_accuracy) == paper.SVHN["maxgain"].accuracy


def test_every_row_of_a_table_that_the_paper_has_is_run():
    assert tuple(paper.CIFAR10) == EXPERIMENTS["cifar10"].rows
    for name in ("cifar100", "sins10"):
        assert set(EXPERIMENTS[name].rows) == set(EXPERIMENTS[name].published)
