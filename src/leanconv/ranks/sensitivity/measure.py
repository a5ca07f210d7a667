"""What is measured of every layer, and what is known of it from an earlier run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from leanconv.calibrate.probes import Probe
from leanconv.forms.fit import split_factors
from leanconv.network.replace import Change
from leanconv.pipeline.engine import Engine
from leanconv.pipeline.image_subset import drawn
from leanconv.ranks.by_sensitivity import Felt, Points
from leanconv.ranks.candidates import Candidate
from leanconv.ranks.sensitivity.output_change import Listener, Projected
from leanconv.ranks.sensitivity.split_loss import split_losses, split_probe
from leanconv.ranks.spectra import Spectra

# Images the output is compared on, once a measurement: VGG-16's twelve layers at three losses are 576 images to pass,
# other networks' in proportion to their layers. Two passes of FITTED images more tell what spatial splits lose.
IMAGES, FITTED = 16, 128
# Shares of the energy of its responses that are taken away from a layer. One that loses the least of them alone hardly
# shows; when all lose something the output is where the larger ones bring it.
LOSSES = (0.3, 0.1, 0.03)
# Shares of a layer's cost at which its splits are looked at.
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2)

Kind = Literal["channel", "spatial"]


def feel(engine: Engine, spectra: Spectra) -> dict[str, Felt]:
    """Of every candidate. What the workdir has of an earlier run is not measured again."""
    form, work, candidates = engine.options.form, engine.work, spectra.candidates
    # Which approximations the output is shown, and which splits are looked at: in the scheme without channels there are
    # only splits, and nothing corrects them.
    kind: Kind = "spatial" if form == "spatial" else "channel"
    splits = "splits as they are" if form == "spatial" else "splits"
    known = {} if work is None else work.sensitivity()
    ranks = {name: _by_share(one) if kind == "spatial" else _by_loss(one) for name, one in candidates.items()}
    losing = {name: some for name, some in ranks.items() if kind not in known.setdefault(name, {})}
    split = {
        name: _by_share(one) for name, one in candidates.items() if form != "channel" and splits not in known[name]
    }
    with engine.reporter.stage("measuring layers", sum(map(len, [*losing.values(), *split.values()]))) as stage:
        if any(split.values()):
            images = drawn(engine, FITTED)
            lost = split_losses(engine, spectra, images, split, stage.advance, corrected=form == "3d")
            for name, points in lost:
                known[name][splits] = points
        if any(losing.values()):
            listener = Listener(engine.original, drawn(engine, IMAGES), engine.device, engine.options.seed)
            for name, some in losing.items():
                if kind == "channel":
                    known[name][kind] = _projected(listener, spectra, name, some, stage.advance)
                else:
                    known[name][kind] = _split(listener, spectra, name, some, known[name][splits], stage.advance)
    if work is not None and (losing or split):
        work.keep_sensitivity(known)
    return {name: Felt(output=known[name].get(kind, ()), splits=known[name].get(splits, ())) for name in candidates}


def _by_loss(one: Candidate) -> list[int]:
    """The smallest ranks that lose no more than LOSSES; not full rank, which loses nothing."""
    assert one.channel is not None
    kept, full = one.channel.kept, one.geometry.channel_limit
    found = {next((rank for rank in range(1, full) if 1.0 - kept[rank] <= loss), full) for loss in LOSSES}
    return sorted(rank for rank in found if rank < full and kept[rank] < 1)


def _by_share(one: Candidate) -> list[int]:
    """The ranks d'' that cost SHARES of the layer; not full rank."""
    if one.spatial is None:
        return []
    full = one.geometry.spatial_limit
    found = {max(1, round(share * one.cost.dense / one.cost.spatial(1))) for share in SHARES}
    return sorted(rank for rank in found if rank < full and one.spatial.kept[rank] < 1)


def _projected(listener: Listener, spectra: Spectra, name: str, ranks: list[int], step: Callable[[], None]) -> Points:
    """(energy of responses lost, change of the output) with responses on their leading components."""
    energies, probe = spectra.candidates[name].channel, spectra.dense[name]
    assert energies is not None
    projected = Projected(probe, spectra.targets.get(name).y, max(ranks, default=0))
    found = []
    for rank in ranks:
        found.append(
            (1.0 - energies.kept[rank], listener.change(_form(probe, "channel", rank), projected.factors(rank)))
        )
        step()
    return tuple(found)


def _split(
    listener: Listener, spectra: Spectra, name: str, ranks: list[int], lost: Points, step: Callable[[], None]
) -> Points:
    """The same with splits, of which is known what they have ``lost``."""
    found = []
    for rank, (_, loss) in zip(ranks, lost, strict=True):
        probe = split_probe(spectra, name, rank)
        found.append((loss, listener.change(_form(probe, "spatial", rank), split_factors(probe))))
        step()
    return tuple(found)


def _form(probe: Probe, kind: Kind, rank: int) -> Change:
    site = probe.site
    return Change(name=site.name, scheme=kind, ranks=(rank,), geometry=site.geometry, batch_norm=site.batch_norm)
