"""The sections of the page: tables, and places for the charts. Names and sentences are escaped by ``markup``."""

from __future__ import annotations

from leanconv.report.facts import Facts, LayerFacts
from leanconv.report.markup import (
    Cell,
    count,
    folded,
    interval,
    paragraph,
    percent,
    points,
    pre,
    si,
    table_of,
    tag,
    text,
)
from leanconv.report.measured import Score

SLOWEST = 1.05  # where the slider begins


def layers(facts: Facts) -> str:
    heads = ["layer", "scheme", "ranks", "of", "MACs", "after", "ratio", "energy", "error"]
    return table_of("Every layer that counts, in the order they run", heads, [_layer(one) for one in facts.layers])


def _layer(layer: LayerFacts) -> list[Cell]:
    if layer.scheme is None:
        return [layer.name, "left alone", "", "", si(layer.macs_before), si(layer.macs_after), "1.00x", "", ""]
    return [
        layer.name,
        layer.scheme,
        " × ".join(map(str, layer.ranks)),
        " × ".join(map(str, layer.limits)),
        si(layer.macs_before),
        si(layer.macs_after),
        f"{layer.macs_before / layer.macs_after:.2f}x",
        "" if layer.energy is None else percent(layer.energy),
        "" if layer.error is None else f"{layer.error:.3f}",
    ]


def legend(facts: Facts) -> str:
    schemes = {layer.scheme for layer in facts.accelerated}
    words = {
        "channel": "channel: k × k filters to d' channels, then 1 × 1",
        "spatial": "spatial: k × 1 filters to d'' channels, then 1 × k",
        "3d": "3d: k × 1 to d'', 1 × k to d', then 1 × 1; ranks are d'' × d'",
        "merged": "merged: took in the 1 × 1 factor of the layer before",
    }
    energy = "energy: share of the variance of responses (of the filters' energy for spatial) that the rank keeps"
    return (
        "; ".join([*(said for scheme, said in words.items() if scheme in schemes), energy, _error_meaning(facts)]) + "."
    )


def ranks_label(facts: Facts) -> str:
    energies = [layer.energy for layer in facts.accelerated if layer.energy is not None]
    return (
        f"Bar chart of ranks as shares of full rank and of energy kept, {count(len(energies), 'layer')}; energy from "
        f"{percent(min(energies))} to {percent(max(energies))}. The numbers are in the table layer by layer."
    )


def _error_meaning(facts: Facts) -> str:
    given = "the inputs the layers before it now give it" if facts.options["asymmetric"] else "the original's inputs"
    if facts.options["scheme"] in ("spatial", "spatial-sgd"):
        given = "the inputs the accelerated network gives it"
    return f"error: ‖r(y) − r(ỹ)‖ / ‖r(y)‖ behind the activation r, with {given}{when(facts)}"


def when(facts: Facts) -> str:
    """Errors are measured while layers are solved; training changes them."""
    return "" if facts.tuned is None else ", measured before fine-tuning"


def error_label(facts: Facts) -> str:
    errors = {layer.name: layer.error for layer in facts.accelerated if layer.error is not None}
    worst, best = max(errors, key=errors.__getitem__), min(errors, key=errors.__getitem__)
    return (
        f"Bar chart of the error of {count(len(errors), 'layer')}{when(facts)}: the largest "
        f"{errors[worst]:.3f} at {worst}, the smallest {errors[best]:.3f} at {best}. The numbers "
        "are in the table layer by layer."
    )


NO_SPECTRA = (
    "This folder was saved without the spectra that ranks are chosen by (by an earlier leanconv, or spectra.json was "
    "removed), so there are no energy curves and no slider here; accelerate the network again to have them."
)


def curves(facts: Facts) -> str:
    if facts.spectra is None:
        return paragraph(NO_SPECTRA)
    figures = []
    kinds = {"channel": ("Responses: energy over d'", "responses"), "spatial": ("Filters: energy over d''", "filters")}
    for kind, (title, what) in kinds.items():
        having = sum(getattr(one, kind) is not None for one in facts.spectra.candidates)
        if having:
            label = (
                f"Curves of the energy that each rank keeps of the {what}, {count(having, 'layer')}, with a dot at the "
                "rank that was chosen. The energies at the chosen ranks are in the table below."
            )
            chart = tag("div", klass="chart", id=f"chart-{kind}", role="img", aria_label=label)
            figures.append(tag("figure", tag("h3", text(title)), chart))
    rows: list[list[Cell]] = [
        [
            layer.name,
            " × ".join(map(str, layer.ranks)),
            "" if layer.energy is None or layer.scheme == "spatial" else percent(layer.energy),
            _filters(layer),
        ]
        for layer in facts.accelerated
    ]
    table = table_of("Energy at the chosen ranks", ["layer", "ranks", "of responses", "of filters"], rows)
    said = "A steep start means that few directions carry the layer; a dot far to the left, that few were kept."
    return paragraph(said) + tag("div", *figures, klass="two") + folded("Energies as a table", table)


def _filters(layer: LayerFacts) -> str:
    found = layer.energy if layer.scheme == "spatial" else layer.filters_energy
    return "" if found is None else percent(found)


def times(facts: Facts) -> str:
    found = facts.times
    if found is None:
        return paragraph("Not measured yet. MACs are not milliseconds: see what to try next for the command.")
    heads = ["runtime", "batch", "before, ms", "after, ms", "faster", "95 % interval", ""]
    rows: list[list[Cell]] = [
        [
            one.runtime,
            str(one.batch),
            f"{one.before.value:.2f}",
            f"{one.after.value:.2f}",
            f"{one.ratio.value:.2f}x",
            interval(one.ratio, "{:.2f}"),
            "noisy" if one.noisy else "",
        ]
        for one in found.measurements
    ]
    made = table_of("Both networks in turns, medians", heads, rows)
    made += paragraph(". ".join([found.machine, *found.notes]) + ".", klass="small")
    if not found.layers:
        return made + paragraph("Layers were not timed one by one; leanconv bench --layers --record does that.")
    batch = found.layers[0].batch
    slow = sum(layer.ratio.value < 1 for layer in found.layers)
    label = (
        f"Bar chart of theoretical and actual speed-up of {count(len(found.layers), 'layer')}; {slow or 'none'} slower "
        "than before. The numbers are in the table below."
    )
    heads = ["layer", "theoretical", "actual", "95 % interval", "before, ms", "after, ms", ""]
    rows = [
        [
            layer.name,
            f"{layer.macs_ratio:.2f}x",
            f"{layer.ratio.value:.2f}x",
            interval(layer.ratio, "{:.2f}"),
            f"{layer.before.value:.3f}",
            f"{layer.after.value:.3f}",
            "noisy" if layer.noisy else "",
        ]
        for layer in found.layers
    ]
    return (
        made
        + tag("h3", text(f"Theoretical against actual, each layer alone, torch, batch {batch}"))
        + tag("figure", tag("div", klass="chart", id="chart-time", role="img", aria_label=label))
        + folded("Times as a table", table_of("Speed-up of each layer", heads, rows))
    )


def accuracy(facts: Facts) -> str:
    found = facts.accuracy
    if found is None:
        return paragraph("Not measured yet: see what to try next for the command.")
    if found.scores[0].lost is None:
        heads, rows = ["", "accelerated"], [[one.label, percent(one.value)] for one in found.scores]
    else:
        heads = ["", "original", "accelerated", "change, points", "95 % interval", "within noise"]
        rows = [_score(one) for one in found.scores]
    agree = "" if found.agreement is None else f"; the same first answer on {percent(found.agreement)}"
    made: list[list[Cell]] = [list(row) for row in rows]
    table = table_of("Shares of images, or mean average precision", heads, made)
    return table + paragraph(f"{count(found.images, 'image')} of {found.data}{agree}.", klass="small")


def _score(one: Score) -> list[str]:
    noise = {None: "", True: "yes", False: "no"}[one.within_noise]
    span = "" if one.interval is None else f"{points(-one.interval.high)} to {points(-one.interval.low)}"
    return [one.label, percent(one.original or 0.0), percent(one.value), points(-(one.lost or 0.0)), span, noise]


def what_if(facts: Facts) -> str:
    if facts.spectra is None:
        return paragraph(NO_SPECTRA)
    chosen = facts.options["ranks"]
    other = "" if chosen == "energy" else " This run chose its ranks otherwise, so they differ at its own target too."
    said = (
        'Ranks are chosen here and now from the spectra of this run, by the rule of ranks="energy"; accelerating with '
        "that target gives the same ones." + other
    )
    slider = tag("input", type="range", id="what-slider", min=str(SLOWEST), step="0.05", aria_describedby="what-said")
    exact = tag("input", type="number", id="what-number", min="1.01", step="any")
    controls = tag(
        "div",
        tag("label", text("Speed-up"), for_="what-slider"),
        slider,
        tag("label", text("exactly"), for_="what-number"),
        exact,
        klass="controls",
    )
    heads = ["layer", "this run", "at that target", "MACs", "after", "energy"]
    rows = table_of("Ranks at another speed-up", heads, [], body="what-body")
    return (
        paragraph(said)
        + controls
        + tag("p", id="what-said", aria_live="polite")
        + rows
        + tag("p", id="what-most", klass="small")
        + tag("pre", id="what-command")
    )


def skipped(facts: Facts) -> str:
    if not facts.skipped:
        return paragraph("No layer: all that count are accelerated.")
    items = []
    for reason, names in facts.skipped.items():
        listed = text(", ".join(names))
        head = tag("b", text(f"{reason[:1].upper()}{reason[1:]}"))
        if len(names) > 8:
            listed = folded(f"{len(names)} layers", tag("p", listed))
        items.append(tag("li", head, text(": ") if len(names) <= 8 else "", listed))
    return tag("ul", *items, klass="reasons")


def repeated(facts: Facts) -> str:
    how = "The command, as it was typed" if facts.typed else f"In Python, with model a {facts.network}"
    how += ":" if facts.tuned is None else "; this made the network before fine-tuning:"
    options = facts.options
    sampled = "as many as needed" if options["samples"] == "auto" else f"{options['samples']:,}"
    entries = {
        "saved in": facts.folder,
        "made with": ", ".join(f"{name} {version}" for name, version in facts.versions.items()),
        "images": f"{facts.images:,}; {sampled} responses sampled a layer, seed {options['seed']}",
        "seconds": ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in facts.seconds.items()) or "not timed",
    }
    if facts.tuned is not None:
        entries["fine-tuned"] = ", ".join(f"{key} {value}" for key, value in facts.tuned.items() if value is not None)
    listed = "".join(tag("dt", text(key)) + tag("dd", text(value)) for key, value in entries.items())
    return paragraph(how) + pre(facts.repeat) + tag("dl", listed, klass="facts")
