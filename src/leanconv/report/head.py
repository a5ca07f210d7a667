"""The top of the page: a sentence, the figures in cards, and what to try next."""

from __future__ import annotations

from leanconv.report.advice import advice
from leanconv.report.facts import Facts
from leanconv.report.markup import count, paragraph, percent, points, pre, si, tag, text


def summary(facts: Facts) -> str:
    options = facts.options
    how = f"{options['scheme']} scheme"
    if options["scheme"] in ("channel", "3d"):
        how += f", {options['solver']} solver, {'asymmetric' if options['asymmetric'] else 'symmetric'}"
    ranks = options["ranks"] if isinstance(options["ranks"], str) else "given by hand"
    ranks = f"by {ranks}" if ranks in ("energy", "sensitivity") else ranks
    tuned = (
        "" if facts.tuned is None else ", then fine-tuned" + (" to the original" if facts.tuned["distilled"] else "")
    )
    done = len(facts.accelerated)
    took = f" in {sum(facts.seconds.values()):.1f} s" if facts.seconds else ""
    return f"{count(done, 'layer')} in factors: {how}, ranks {ranks}, {count(facts.images, 'image')}{took}{tuned}."


def cards(facts: Facts) -> str:
    found = [
        _card(
            "Multiply-accumulates",
            *change(facts.macs_before, facts.macs_after, "dearer"),
            f"{si(facts.macs_before)} → {si(facts.macs_after)} an image",
        ),
        _card(
            "Parameters",
            *change(facts.parameters_before, facts.parameters_after, "more"),
            f"{si(facts.parameters_before)} → {si(facts.parameters_after)} in all layers",
        ),
        _time_card(facts),
        _accuracy_card(facts),
    ]
    return "".join(found)


def change(before: int, after: int, risen: str) -> tuple[str, str]:
    """How many times fewer, or ``risen``; always from 1 up."""
    return (f"{before / after:.2f}x", "fewer") if after <= before else (f"{after / before:.2f}x", risen)


def _card(title: str, figure: str | None, unit: str, below: str) -> str:
    """``figure`` None: it is not known, and ``unit`` says so."""
    value = tag("p", text(unit), klass="figure none")
    if figure is not None:
        value = tag("p", text(figure), text(" "), tag("span", text(unit)), klass="figure")
    return tag("div", tag("h2", text(title)), value, paragraph(below), klass="card")


def _time_card(facts: Facts) -> str:
    if facts.times is None:
        return _card("Measured time", None, "not measured", "leanconv bench … --record")
    one = facts.times.measurements[0]
    below = (
        f"{one.before.value:.2f} → {one.after.value:.2f} ms, {one.runtime}, batch {one.batch}; 95 % interval "
        f"{one.ratio.low:.2f} to {one.ratio.high:.2f}{', noisy' if one.noisy else ''}"
    )
    word = "faster" if one.ratio.value >= 1 else "as fast"
    return _card("Measured time", f"{one.ratio.value:.2f}x", word, below)


def _accuracy_card(facts: Facts) -> str:
    if facts.accuracy is None:
        return _card("Accuracy", None, "not measured", "leanconv evaluate … --record")
    first = facts.accuracy.scores[0]
    if first.lost is None or first.original is None:
        return _card(
            f"Accuracy, {first.label}",
            f"{100 * first.value:.1f}",
            "%",
            f"{count(facts.accuracy.images, 'image')}, alone",
        )
    below = f"{percent(first.original)} → {percent(first.value)}"
    if first.interval is not None:
        below += f"; 95 % interval {points(-first.interval.high)} to {points(-first.interval.low)}"
        below += ", within noise" if first.within_noise else ""
    return _card(f"Accuracy, {first.label}", points(-first.lost), "points", below)


def advised(facts: Facts) -> str:
    items = [tag("li", text(one.text), "" if one.command is None else pre(one.command)) for one in advice(facts)]
    return tag("ol", *items, klass="advice") if items else paragraph("Nothing stands out: the network is ready to use.")
