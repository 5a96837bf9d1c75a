"""Numbers and verdicts in words that claim no more than the test shows."""

from collections.abc import Sequence

from . import statistics
from .plan import Plan
from .statistics import ALPHA, Difference, Interval, Verdict, is_equivalent

CHANGED: dict[Verdict, str] = {"established": "raised", "reversed": "lowered"}
OPENING: dict[Verdict, str] = {"equivalent": "No difference that matters: ", "inconclusive": "Cannot tell: "}
SHORT: dict[Verdict, str] = {
    "established": "better",
    "reversed": "worse",
    "equivalent": "no difference that matters",
    "inconclusive": "cannot tell",
}

# Numbers


def signed(value: float, decimals: int = 2) -> str:
    """+1.25 or −1.25; what rounds to zero has no sign."""
    text = f"{value:+.{decimals}f}"
    return text.replace("-", "−") if float(text) else text[1:]


def percent(fraction: float | None, error: float | None = None) -> str:
    """0.9075 as 90.75, with its standard error if there is one; a dash for None."""
    if fraction is None:
        return "–"
    return f"{100 * fraction:.2f}" + ("" if error is None else f" ± {100 * error:.2f}")


def points(difference: float) -> str:
    """A difference of accuracies in points, to the first decimal that shows it, at most three."""
    texts = [signed(100 * difference, decimals) for decimals in (1, 2, 3)]
    return next((text for text in texts if text[0] in "+−"), "0.0")


def reach(interval: Interval) -> str:
    """−2.8 to +1.7."""
    return " to ".join(points(end) for end in interval)


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


# Contrasts


def headline(contrasts: Sequence[tuple[str, str, Difference | None, Verdict]], rope: float | None) -> str:
    """The contrasts of a family (first, second, difference, verdict) as one title; more than three are counted."""
    if len(contrasts) == 1:
        ((first, second, test, verdict),) = contrasts
        if test is None or test.interval is None:
            return f"Cannot tell: no test of {first} against {second} is possible"
        within = f", within ±{100 * (rope or 0):g}" if verdict == "equivalent" else ""
        against = "" if second == "none" else f" against {second}"
        return f"{OPENING.get(verdict, '')}{_changed(first, test, verdict)} ({reach(test.interval)}){within}{against}"
    if len(contrasts) > 3:
        clauses = []
        for word, text in SHORT.items():
            means = [test.mean if test else 0.0 for *_, test, verdict in contrasts if verdict == word]
            if means:
                ends = f" ({points(min(means))} to {points(max(means))} points)" if word in CHANGED else ""
                clauses.append(f"{text} in {len(means)} of {len(contrasts)} contrasts{ends}")
        return listed(clauses).capitalize()
    baselines = {second for _, second, *_ in contrasts}
    clauses = [
        first
        + ("" if test is None else f" {points(test.mean)} points")
        + ("" if len(baselines) == 1 else f" against {second}")
        + (f" ({reach(test.interval)})" if test and test.interval else "")
        + f", {SHORT[verdict]}"
        for first, second, test, verdict in contrasts
    ]
    return (f"Against {baselines.pop()}: " if len(baselines) == 1 else "") + "; ".join(clauses)


def finding(
    first: str, second: str, difference: Difference | None, verdict: Verdict, rope: float | None, over: str
) -> str:
    """What the runs that have a score show about one contrast, without a full stop."""
    if difference is None:
        return f"No {over} has a score of both {first} and {second}"
    if difference.p_holm is None or difference.interval is None:
        why = "too few to test" if difference.n < 2 else "no spread, so no test"
        units = counted(difference.n, over)
        return f"{first} differs from {second} by {points(difference.mean)} points on {units}: {why}"
    within = f", within ±{100 * rope:g} points" if rope is not None and is_equivalent(difference) else ""
    conclusion = {
        "equivalent": f" ({p_equals(difference.p_equivalence)}): equivalent",
        "inconclusive": ": inconclusive, which is no evidence of equality",
    }.get(verdict, "")
    evidence = f"95 % CI {reach(difference.interval)}, {p_equals(difference.p_holm)}"
    return f"{_changed(first, difference, verdict)} against {second} ({evidence}){within}{conclusion}"


def _changed(first: str, difference: Difference, verdict: Verdict) -> str:
    size = points(difference.mean)
    if verdict in CHANGED:
        return f"{first} {CHANGED[verdict]} accuracy by {size[1:]} points"
    return f"{first} changed accuracy by {size} points"


def disagreement(analysis: str, check: Difference | None, verdict: Verdict) -> str:
    """What the check says where its verdict is another one."""
    other = statistics.verdict(check)
    if check is None or check.p_holm is None or other == verdict:
        return ""
    return f"; the check, the {analysis} analysis, is {other} ({p_equals(check.p_holm)})"


def with_failures(guess: Difference | None, chance: float, verdict: Verdict, holds: bool) -> str:
    """What counting failed runs as guesses does to a contrast and its verdict."""
    if guess is None or guess.p_holm is None:
        return ""
    then = "" if verdict == "inconclusive" else "; the verdict stands" if holds else "; the verdict is withdrawn"
    counting = f"counting failed runs as guesses ({100 * chance:.3g} %)"
    return f"; {counting} makes it {points(guess.mean)} points ({p_equals(guess.p_holm)}){then}"


# Method


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
