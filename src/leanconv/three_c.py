"""``scheme="3c"``: channels pruned, then what is left approximated by 3d, both to give the original's responses.

How much is pruned is found out: the whole run is made on most of the images, without pruning and with more and more of
it at the same MACs in all, and judged by the outputs on the others; then once more on all images.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from leanconv.calibrate.batches import Batches, out_of_memory, take, to_device
from leanconv.calibrate.patches import Positions
from leanconv.calibrate.probe import Probe
from leanconv.clock import Clock
from leanconv.engine import Teacher
from leanconv.entrance import copied
from leanconv.errors import LeanconvError
from leanconv.job import Job, restore
from leanconv.network.detector import kind_of
from leanconv.network.replace import Change
from leanconv.network.replace import replace as put_change
from leanconv.network.source import identify
from leanconv.options import Options
from leanconv.progress import Progress
from leanconv.pruning import EACH, JUDGING, Pruned, Pruning
from leanconv.result import Accelerated, LayerReport
from leanconv.train.goals import divergence

# MACs of the whole network before pruning, in those after it; tried in this order, until so many in a row do not do
# better than the best before them.
FACTORS = (1.15, 1.3, 1.5, 1.75, 2.0)
PATIENCE = 2
# What is left for 3d to do, at least.
LEFT = 1.25
# Images there must be, so that eight of them judge: fewer would say anything.
FEWEST = 64

INSTEAD = "use scheme='3d' instead"

Run = Callable[[Job, Batches, Teacher | None], Accelerated]


def check(model: nn.Module, *, workdir: bool, processes: int) -> None:
    """Refuse what 3c does not do, before any work."""
    if kind_of(model) is not None:
        raise LeanconvError(f"scheme='3c' does not prune detectors, and a {type(model).__name__} was given; {INSTEAD}.")
    if workdir:
        raise LeanconvError(f"scheme='3c' keeps no workdir: it goes over several networks; leave it out, or {INSTEAD}.")
    if processes > 1:
        raise LeanconvError(f"scheme='3c' runs in one process, and there are {processes}; {INSTEAD}.")


def three_c(job: Job, batches: Batches, options: Options, clock: Clock, reporter: Progress, run: Run) -> Accelerated:
    """``run`` makes a job's network with the images given, fitted to the responses of the teacher if there is one."""
    sample = batches.sample()
    most, held = _parted(batches)
    _check_outputs(job.original, held[:1], job.device)
    if not job.prunable:
        raise LeanconvError(
            "scheme='3c' prunes filters whose maps go into one other convolution alone, and this network has none, or "
            f"only in layers to skip; {INSTEAD}."
        )
    pruning = Pruning(job.original, job.filters, job.prunable, job.survey, job.dtype)
    per_image = max(1, -(-options.most_samples // batches.images))
    positions = Positions(per_image=per_image, images=batches.images, seed=options.seed, device=job.device)
    with clock.stage("pruning"), reporter.stage("pruning", batches.steps + len(job.prunable)) as stage:
        _measured(pruning, batches, positions, job.device, stage.advance)
        pruning.choose(stage.advance)

    def pruned_by(factor: float) -> Pruned:
        with clock.stage("pruning"):
            restore(job.original, job.buffers)
            return pruning.pruned(pruning.keeps(factor))

    def made(images: Batches, pruned: Pruned | None) -> Accelerated:
        restore(job.original, job.buffers)  # running a network may change some
        if pruned is None:
            return replace(run(_plain(job, sample, options), images, None), spectra=None)
        mine = replace(options, speedup=options.speedup * pruned.macs / job.survey.macs)
        found = run(_plain(job, sample, mine, pruned.model), images, _teacher(job, pruned))
        return _on_original(found, job, pruned)

    tried: list[tuple[float, float]] = []
    changes: list[Tensor] = []  # of each image held out
    best = 0  # of those tried
    for factor in (1.0, *FACTORS):
        pruned = None if factor == 1 else pruned_by(factor)
        reached = 1.0 if pruned is None else job.survey.macs / pruned.macs
        if pruned is not None and (options.speedup / reached < LEFT or reached <= tried[-1][0]):
            break
        try:
            change = _change(job.original, made(most, pruned).model, held, job.device)
        except LeanconvError:
            if pruned is None:
                raise
            break  # so little is left that 3d cannot meet what is asked for
        tried.append((reached, float(change.mean())))
        changes.append(change)
        best = min(range(len(tried)), key=lambda number: tried[number][1])
        if len(tried) - best > PATIENCE:
            break
    final: Pruned | None = None
    if best and _surely(changes[0] - changes[best]):
        with clock.stage("pruning"):
            pruning.choose(lambda: None, everything=True)
        final = pruned_by(FACTORS[best - 1])
    pruning.forget()
    reached = 1.0 if final is None else job.survey.macs / final.macs
    facts = {"factor": reached, "tried": [list(one) for one in tried]}
    return replace(made(batches, final), options=options, source=identify(job.original), pruning=facts)


def _check_outputs(original: nn.Module, held: list[Tensor], device: torch.device) -> None:
    try:
        _change(original, original, held, device)
    except LeanconvError:
        raise LeanconvError(
            f"scheme='3c' judges by outputs that go image by image, and this network has none; {INSTEAD}."
        ) from None


def _measured(
    pruning: Pruning, batches: Batches, positions: Positions, device: torch.device, step: Callable[[], None]
) -> None:
    """Where the device runs out of memory batches are halved, and the pass begins anew."""
    while True:
        try:
            return pruning.measure(batches, positions, device, step)
        except Exception as error:
            if not out_of_memory(error) or not batches.halve():
                raise


def _parted(batches: Batches) -> tuple[Batches, list[Tensor]]:
    """Images to fit to and images to judge by."""
    pieces = [piece for batch in batches for piece in batch.pieces]
    odd = [type(piece).__name__ for piece in pieces if not isinstance(piece, Tensor)]
    if odd:
        raise LeanconvError(
            f"scheme='3c' takes batches that are tensors of images, and a {odd[0]} was given; {INSTEAD}."
        )
    count = sum(len(piece) for piece in pieces)
    if count < FEWEST:
        raise LeanconvError(
            f"scheme='3c' holds out an eighth of the images to judge by, and {count} were given; give at least {FEWEST}"
            f", or {INSTEAD}."
        )
    most, held, first = [], [], 0
    for piece in pieces:
        judges = torch.arange(first, first + len(piece)) % EACH == JUDGING
        first += len(piece)
        most += [piece[~judges]] if not judges.all() else []
        held += [piece[judges]] if judges.any() else []
    return take(most), held


def _plain(job: Job, sample: object, options: Options, model: nn.Module | None = None) -> Job:
    """The job of ``model``, or of the original, by 3d; its training comes later."""
    refine = "closed-form" if options.refine == "distill" else options.refine
    return Job.prepare(model or job.original, sample, replace(options, scheme="3d", refine=refine), job.device)


def _teacher(job: Job, pruned: Pruned) -> Teacher:
    """The original, and what it responds with the filters that were kept."""
    probes = {}
    for name, site in {**job.sites, **pruned.sites}.items():
        weight, bias = job.filters.of(site, job.dtype)
        if name in pruned.kept:
            stay = pruned.kept[name]
            site = replace(site, geometry=replace(site.geometry, out_channels=len(stay)))
            weight, bias = weight[stay], bias[stay]
        probes[name] = Probe(site, weight, bias)
    return Teacher(job.original, probes)


@torch.no_grad()
def _change(original: nn.Module, network: nn.Module, held: list[Tensor], device: torch.device) -> Tensor:
    """Of every image's outputs: the divergence of class scores, or the relative squared distance of what is none."""
    network.to(device)
    found = []
    for piece in held:
        # Each its own copy: a network may work in place.
        answer, given = (model(to_device(piece, device)) for model in (original, network))
        found.append(divergence(given, answer, len(piece)).double().cpu())
    return torch.cat(found)


def _surely(gains: Tensor) -> bool:
    """Whether the mean is above zero by more than its standard error: less is chance."""
    return float(gains.mean()) > float(gains.std()) / math.sqrt(len(gains))


def _on_original(found: Accelerated, job: Job, pruned: Pruned) -> Accelerated:
    """A result of the pruned network as one of the original."""
    known = {change.name: change for change in found.changes}
    for name, site in pruned.sites.items():
        kept = tuple(pruned.kept[name].tolist()) if name in pruned.kept else None
        own = Change(name=name, scheme="pruned", ranks=(), geometry=pruned.geometries[name])
        known[name] = replace(known.get(name, own), batch_norm=site.batch_norm, kept=kept)
    order = {layer.name: number for number, layer in enumerate(job.survey.layers)}
    changes = sorted(known.values(), key=lambda change: order[change.name])
    model = copied(job.original)
    state = dict(found.model.state_dict())
    for change in changes:
        put_change(model, change)
        if change.scheme == "pruned":
            for key in ("weight", "bias"):
                state[f"{change.name}.whole.{key}"] = state.pop(f"{change.name}.{key}")
    model.load_state_dict(state)
    restore(model, job.buffers)
    before = {layer.name: layer.macs for layer in job.survey.layers}
    reports = {layer.name: replace(layer, macs_before=before[layer.name]) for layer in found.layers}
    for change in changes:
        if change.name not in reports:
            old, new = pruned.sites[change.name].geometry, change.geometry
            left = new.in_channels * new.out_channels / (old.in_channels * old.out_channels)
            reports[change.name] = LayerReport(
                name=change.name,
                scheme=change.scheme,
                ranks=(),
                macs_before=before[change.name],
                macs_after=round(left * before[change.name]),
                energy=1 - pruned.lost.get(change.name, 0.0),
                error=math.sqrt(pruned.lost.get(change.name, 0.0)),
            )
    return replace(
        found,
        model=model.eval(),
        layers=sorted(reports.values(), key=lambda report: order[report.name]),
        skipped={name: why for name, why in found.skipped.items() if name not in reports},
        macs_before=job.survey.macs,
        parameters_before=sum(parameter.numel() for parameter in job.original.parameters()),
        changes=changes,
        spectra=None,
    )
