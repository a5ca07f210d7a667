"""Facts -> one HTML file that needs nothing else: styles, scripts, data and the plotting library are inside."""

from __future__ import annotations

import base64
import functools
import gzip
import math
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from leanconv import __version__
from leanconv.errors import LeanconvError, listing
from leanconv.evaluation.paired import points
from leanconv.forms import FORMS, RESPONSES
from leanconv.ranks import KeptSpectra
from leanconv.report.advice import advice
from leanconv.report.comparison import Comparison, against_macs, against_time, tables
from leanconv.report.facts import Facts, LayerFacts, facts_of
from leanconv.report.plans import plans
from leanconv.system.atomic_files import cannot_write, check_name, check_parent, folders_of, is_taken, write_whole

REPORT = "report.html"
COMPARISON = "comparison.html"
Kind = Literal["report", "comparison"]
# Points of an energy curve: no more than can be seen.
CURVE = 160

# Everything that ranks may cut.
AXES = tuple(dict.fromkeys(axis for form in FORMS.values() for axis in form.axes))


def write_report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of a saved ``folder`` to ``out``, by default ``report.html`` inside it. An earlier report is
    replaced, any other file is not."""
    folder = Path(folder)
    path = folder / REPORT if out is None else Path(out)
    check_page(path, "report")
    return _write(page(facts_of(folder)), path)


def write_comparison(comparison: Comparison, path: str | Path) -> Path:
    """Write the page of several folders to ``path``. An earlier comparison is replaced, any other file is not."""
    check_page(Path(path), "comparison")
    return _write(comparison_page(comparison), Path(path))


def check_page(path: Path, kind: Kind) -> None:
    """Before any work: can a page be written to ``path``, and does this machine have what draws it?"""
    check_name(path, "file", 150)
    taken = is_taken(path)
    if taken and path.is_dir():
        raise LeanconvError(f"--out {str(path)!r} is a folder; give the name of a file, such as report.html.")
    if taken and not _is_page(path, kind):
        raise LeanconvError(f"{str(path)!r} exists and is no {kind} of leanconv; choose another name or remove it.")
    check_parent(path)
    plotly_js()


def _mark(kind: Kind) -> str:
    """In the first bytes of a page: such a file may be replaced by another page of its kind."""
    return f"leanconv {kind}, version 1"


def _is_page(path: Path, kind: Kind) -> bool:
    try:
        with path.open("rb") as file:
            return _mark(kind).encode() in file.read(200)
    except OSError:
        return False


def _write(text: str, path: Path) -> Path:
    """Write ``text`` and the folders it needs; if that fails, none of them is left."""
    try:
        with folders_of(path):
            write_whole(path, text)
    except OSError as error:
        raise cannot_write(path, error, "nothing was changed") from error
    return path


def page(facts: Facts) -> str:
    """The whole file about one folder."""
    errors, ranks = facts.errors, facts.options["ranks"]
    chosen = ranks if isinstance(ranks, str) else "given by hand"
    return _template("report.html.j2").render(
        mark=_mark("report"),
        facts=facts,
        # Whether responses were fitted, which the solver and asymmetric are about.
        fitted=any(RESPONSES.name in layer.kinds for layer in facts.layers),
        ranks=f"by {chosen}" if chosen in ("energy", "sensitivity", "latency") else chosen,
        advice=advice(facts),
        meanings={name: form.about for name, form in FORMS.items() if name in {layer.scheme for layer in facts.layers}},
        axes=[axis for axis in AXES if _curves(facts, axis.name)],
        energies=[layer.energy for layer in facts.accelerated if layer.energy is not None],
        worst=max(errors, key=errors.__getitem__, default=None),
        best=min(errors, key=errors.__getitem__, default=None),
        slower=sum(layer.ratio.value < 1 for layer in facts.times.layers) if facts.times else 0,
        data=_data(facts),
    )


def comparison_page(comparison: Comparison) -> str:
    """The whole file about several folders."""
    results = comparison.results
    charts = {"chart-macs": against_macs(results), "chart-times": against_time(results)}
    measure = listing(dict.fromkeys(one.accuracy.scores[0].label for one in results if one.accuracy))
    return _template("comparison.html.j2").render(
        mark=_mark("comparison"),
        results=results,
        sources=listing(dict.fromkeys(one.source for one in results)),
        measure=measure,
        charts=charts,
        tables=tables(results),
        remarks=comparison.remarks,
        data={"measure": measure, "charts": charts},
    )


def _data(facts: Facts) -> dict[str, Any]:
    """What the scripts of a page about one folder need."""
    # Ranks by hand or by time have no target in MACs: the speed-up that was reached, rounded down, stands for it.
    asked = None if facts.options["ranks"] == "latency" else facts.options["speedup"]
    target = max(1.05, math.floor(20 * facts.speedup) / 20) if asked is None else asked
    return {
        "another": facts.another,
        "target": target,
        "layers": [_layer(layer) for layer in facts.layers],
        "times": [asdict(layer) for layer in facts.times.layers] if facts.times else [],
        "curves": {axis.name: _curves(facts, axis.name) for axis in AXES},
        "axes": [[axis.name, axis.symbol] for axis in AXES],
        **(_slider(facts, facts.spectra, target) if facts.spectra else {"plans": []}),
    }


def _slider(facts: Facts, kept: KeptSpectra, target: float) -> dict[str, Any]:
    """For each candidate its name, its form in this run and its MACs; for each plan its sentence and its layers."""
    labels = {layer.name: layer.label for layer in facts.layers}
    now = [labels.get(one.name, "") for one in kept.candidates]
    shown = []
    for plan in plans(kept, target):
        differ = sum(layer.label != label for layer, label in zip(plan.layers, now, strict=True))
        said = f"At {plan.speedup:g}x: {_count(plan.replaced, 'layer')} replaced, {_si(plan.before)} → "
        said += f"{_si(plan.after)} MACs ({plan.before / plan.after:.3f}x, skipped layers counted); "
        said += f"{_count(differ, 'layer')} "
        shown.append(
            {
                "speedup": plan.speedup,
                "said": f"{said}{'differs' if differ == 1 else 'differ'} from this run.",
                "layers": [
                    [one.label, _si(one.macs), f"{100 * one.energy:.1f} %", round(one.macs / candidate.cost.dense, 4)]
                    for one, candidate in zip(plan.layers, kept.candidates, strict=True)
                ],
            }
        )
    dense = [[one.name, form, _si(one.cost.dense)] for one, form in zip(kept.candidates, now, strict=True)]
    return {"candidates": dense, "plans": shown}


def _layer(layer: LayerFacts) -> dict[str, Any]:
    """JSON has no infinity, which is the error if the original's responses are all 0 and these are not."""
    finite = layer.error is not None and math.isfinite(layer.error)
    return {**asdict(layer), "error": layer.error if finite else None}


def _curves(facts: Facts, kind: str) -> list[dict[str, Any]]:
    """Energy in percent over the rank, one curve a layer, and the rank that this run chose."""
    chosen = {layer.name: dict(zip(layer.kinds, layer.ranks, strict=False)).get(kind) for layer in facts.layers}
    curves = []
    for candidate in facts.spectra.candidates if facts.spectra else ():
        energies = candidate.spectra.get(kind)
        if energies is None:
            continue
        full = len(energies.values)
        ranks = sorted({*range(0, full + 1, max(1, -(-full // CURVE))), full})
        rank = chosen.get(candidate.name)
        curves.append(
            {
                "name": candidate.name,
                "full": full,
                "ranks": ranks,
                "energy": [round(100 * energies.kept[rank], 3) for rank in ranks],
                "chosen": None if rank is None else [rank, round(100 * energies.kept[rank], 3)],
            }
        )
    return curves


@functools.cache
def _template(name: str) -> Template:
    """Every value is escaped where it is put in."""
    made = Environment(
        loader=PackageLoader("leanconv.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    made.filters.update(si=_si, count=_count, points=points)
    made.filters.update(
        percent=lambda share: "" if share is None else f"{100 * share:.1f} %",
        fixed=lambda value, digits: "" if value is None else f"{value:.{digits}f}",
        span=lambda ratio: f"{ratio.low:.2f} to {ratio.high:.2f}",
        # The interval of a loss as one of a change.
        gain=lambda lost: "" if lost is None else f"{points(-lost.high)} to {points(-lost.low)}",
    )
    made.globals.update(version=__version__, file=_file, plotly=_packed_plotly, change=_change)
    return made.get_template(name)


def _file(name: str) -> Markup:
    return Markup(resources.files("leanconv.report").joinpath(name).read_text(encoding="utf-8"))


@functools.cache
def plotly_js() -> str:
    """The plotting library, for browsers."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise LeanconvError("plotly is not installed; pip install 'leanconv[report]'.") from None
    text: str = get_plotlyjs()
    return text


@functools.cache
def _packed_plotly() -> str:
    return base64.b64encode(gzip.compress(plotly_js().encode(), mtime=0)).decode()


def _si(value: float) -> str:
    """Three digits and a unit: 29.4 M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:
            number = value / size
            return f"{number:.{max(0, 2 - len(str(int(number))) + 1)}f} {unit}"
    return f"{value:g}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _change(before: int, after: int) -> tuple[str, str]:
    """How many times fewer, or more; always from 1 up."""
    return (f"{before / after:.2f}x", "fewer") if after <= before else (f"{after / before:.2f}x", "more")
