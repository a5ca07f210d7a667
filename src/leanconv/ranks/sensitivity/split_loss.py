"""What splits of filters lose of a layer's responses, as they are or once the solver has made the best of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from leanconv.calibrate.batches import Batch
from leanconv.calibrate.probes import Probe
from leanconv.calibrate.streams import Streams, collected
from leanconv.forms import Axis
from leanconv.ranks.by_sensitivity import Points
from leanconv.ranks.spectra import Spectra
from leanconv.solve import reduced_rank

# Responses of a layer that a split is corrected and judged by.
ROWS = 8192


def split_losses(
    streams: Streams,
    spectra: Spectra,
    axis: Axis,
    images: list[Batch],
    ranks: dict[str, list[int]],
    step: Callable[[], None],
    *,
    corrected: bool,
) -> Iterator[tuple[str, Points]]:
    """(energy of filters lost, energy of responses lost) at the ranks named, of every layer. Two passes of ``images``.

    ``corrected``: as the solver will map a split's responses to the original's, so does a regression here, from half of
    the images, and the other half tells what it is worth. It is worth much: of the energy that a split loses by itself
    a fifth to two thirds are left in VGG-16.
    """
    most = {name: max(some) for name, some in ranks.items() if some}
    whole = collected(streams, images, {name: spectra.dense[name] for name in most}, ROWS)
    probes = {name: split_probe(spectra, name, axis, rank) for name, rank in most.items()}
    halves = collected(streams, images, probes, ROWS)
    for name, some in ranks.items():
        found, energies = [], spectra.candidates[name].spectrum(axis)
        for rank in some:
            assert energies is not None
            probe = split_probe(spectra, name, axis, rank)
            # The split of a smaller rank is part of that of a larger one.
            x = halves.get(name).y.unflatten(1, (most[name], -1))[:, :rank].flatten(1)
            loss = split_loss(probe, whole.get(name).y, probe.responses(x), corrected=corrected)
            found.append((1.0 - energies.kept[rank], loss))
            step()
        yield name, tuple(found)
    whole.close()
    halves.close()


def split_loss(probe: Probe, y: Tensor, given: Tensor, *, corrected: bool) -> float:
    """Share of the energy of ``y`` (n x d) that ``given`` (n x d) leaves; ``corrected`` by a regression, no more than
    as it is: few rows make a bad one."""
    half, full = len(y) // 2, probe.site.geometry.channel_limit
    ways = [given[half:]]
    if corrected:
        ways.append(reduced_rank(y[:half], given[:half], full, space=probe.spaces[0])(given[half:]))
    y = y[half:]
    energy = float((y - y.mean(0)).double().square().sum())
    left = min(float((y - way).double().square().sum()) for way in ways)
    return left / energy if energy > 0 else 0.0


def split_probe(spectra: Spectra, name: str, axis: Axis, rank: int) -> Probe:
    """Of the product of a split; what its second factor sees is collected."""
    dense, split = spectra.dense[name], spectra.split(name, axis, rank)
    return Probe(dense.site, split.product(), dense.bias, split, halfway=True)
