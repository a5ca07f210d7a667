"""What is measured of every layer: how far the output moves by an error of its responses, and what splits lose."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from leanconv.calibrate.batches import Batch, log, out_of_memory
from leanconv.calibrate.gradients import AT_ONCE, Gradients, in_parts, output_gradients
from leanconv.calibrate.probes import Probe
from leanconv.calibrate.streams import Streams, collected, drawn
from leanconv.forms import Axis
from leanconv.ranks.sensitivity.merit import Points
from leanconv.ranks.spectra import Spectra
from leanconv.solve import reduced_rank

# Images that gradients are taken of: two to three passes of so many.
IMAGES = 128
# Responses of a layer that a split is corrected and judged by.
ROWS = 8192
STAGE = "measuring layers"


def measure_gradients(streams: Streams, spectra: Spectra) -> dict[str, Gradients]:
    """Of every layer. Where the device runs out of memory fewer images go through together."""
    images, most = drawn(streams, IMAGES), AT_ONCE
    alone = streams.cutting is not None and streams.cutting.one_by_one
    while True:
        batches = list(in_parts(images, most)) if alone else images
        try:
            with (
                streams.clock.stage("measuring layers"),
                streams.reporter.stage("measuring layers", len(batches)) as stage,
            ):
                return output_gradients(
                    streams.original,
                    batches,
                    spectra.dense,
                    spectra.targets.get,
                    device=streams.device,
                    seed=streams.seed,
                    step=stage.advance,
                )
        except Exception as error:
            if not (out_of_memory(error) and alone and most > 1):
                raise
            most //= 2
            log.info("gradients of %d images at a time", most)


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
    """(energy of filters lost, energy of responses lost) of every layer at these ``ranks``. Two passes of ``images``.

    ``corrected``: a regression on half of the images maps a split's responses to the original's, as the solver will,
    and the other half shows what is still lost: in VGG-16 a fifth to two thirds of what a split alone loses.
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
    """Share of the energy of ``y`` (n x d) that ``given`` (n x d) does not explain. ``corrected``: by a regression,
    where it helps: on few rows it may not."""
    half, full = len(y) // 2, probe.site.geometry.channel_limit
    ways = [given[half:]]
    if corrected:
        ways.append(reduced_rank(y[:half], given[:half], full, space=probe.spaces[0])(given[half:]))
    y = y[half:]
    energy = float((y - y.mean(0)).double().square().sum())
    left = min(float((y - way).double().square().sum()) for way in ways)
    return left / energy if energy > 0 else 0.0


def split_probe(spectra: Spectra, name: str, axis: Axis, rank: int) -> Probe:
    """A probe of the product of a split that collects the input of its second factor."""
    dense, split = spectra.dense[name], spectra.split(name, axis, rank)
    return Probe(dense.site, split.product(), dense.bias, split, halfway=True)
