"""Numbers and verdicts in words that claim no more than the test shows."""

from collections.abc import Sequence

from .plan import Plan
from .statistics import ALPHA, Interval


def points(difference: float) -> str:
    """A difference of accuracies in points, +1.25 or −1.25; what rounds to zero has no sign."""
    text = f"{100 * difference:+.2f}"
    return text.replace("-", "−") if float(text) else text[1:]


def reach(interval: Interval) -> str:
    """−2.84 to +1.73."""
    return " to ".join(map(points, interval))


def percent(fraction: float | None, error: float | None = None) -> str:
    """0.9075 as 90.75, with its standard error if there is one; a dash for None."""
    if fraction is None:
        return "–"
    return f"{100 * fraction:.2f}" + ("" if error is None else f" ± {100 * error:.2f}")


def p_value(p: float | None) -> str:
    """Three decimals, or as many as it takes not to round across the threshold; a dash for None."""
    if p is None:
        return "–"
    if p < 0.001:
        return "< 0.001"
    texts = (f"{p:.{decimals}f}" for decimals in range(3, 18))
    return next((text for text in texts if (float(text) < ALPHA) == (p < ALPHA)), repr(p))


def p_equals(p: float | None) -> str:
    """The text p = 0.031, or p < 0.001."""
    text = p_value(p)
    return f"p {text}" if text.startswith("<") else f"p = {text}"


def counted(count: int, thing: str) -> str:
    """1 run, 2 runs, 1,797 images."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def listed(names: Sequence[str]) -> str:
    """a, b and c."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def method(plan: Plan, score: str) -> str:
    """How the rows were trained, scored and tuned, and the contrasts tested."""
    parts = "the training and validation parts" if plan.recipe.train_on == "train+validation" else "the training part"
    repeats = f" with {plan.repeats} seeds each, averaged" if plan.repeats > 1 else ""
    text = [
        f"{counted(len(plan.rows), 'row')} on {plan.recipe.dataset}, {counted(len(plan.units), plan.over)}{repeats}; "
        f"trained on {parts}, scored by {score} accuracy."
    ]
    if plan.tuning_runs:
        budgets = listed([f"{row} {runs}" for row, runs in plan.tuning_runs.items()])
        where = "on every fold" if plan.over == "fold" else "once"
        text.append(f"Numbers were chosen {where} on the validation part; runs spent: {budgets}.")
    if not plan.contrasts:
        return " ".join(text)
    paired = "the paired t-test over seeds on one data split, which says nothing about other splits"
    if plan.over == "fold":
        paired = f"the paired t-test on {'folds' if plan.overlap else 'disjoint folds'}"
    pooled = f"the model accuracy ~ row + {plan.over}, one error variance pooled over all rows"
    decides, checks = (paired, pooled) if plan.decide_by == "paired" else (pooled, paired)
    text.append(f"Verdicts follow {decides}; the check is {checks}.")
    if plan.overlap:
        text.append("Training sets overlap, so both use Nadeau and Bengio's corrected variance.")
    if (count := len(plan.contrasts)) > 1:
        text.append(f"{count} contrasts are one family: Holm's p-values, simultaneous intervals (Bonferroni).")
    text.append(f"Established: p < {ALPHA:g} for the first row; reversed: p < {ALPHA:g} against it.")
    if plan.rope is not None:
        text.append(f"Equivalent: by two one-sided tests within ±{plan.rope:g} points (p < {ALPHA:g}).")
    return " ".join([*text, "Inconclusive is no evidence of equality."])
