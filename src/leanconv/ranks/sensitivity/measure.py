"""What is measured of every layer: how far the output moves by an error of its responses, and what splits lose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from leanconv.calibrate.batches import log, out_of_memory
from leanconv.calibrate.gradients import AT_ONCE, Gradients, in_parts, output_gradients
from leanconv.calibrate.probes import Probe
from leanconv.calibrate.streams import Streams, drawn
from leanconv.errors import LeanconvError
from leanconv.forms import Axis
from leanconv.ranks.sensitivity.merit import Points
from leanconv.ranks.spectra import Spectra
from leanconv.solve import Metric, ResponseSpace, TwoStep, reduced_rank

# Images that gradients are taken of: two to three passes of so many.
IMAGES = 128
STAGE = "measuring layers"


def measure_gradients(streams: Streams, spectra: Spectra) -> dict[str, Gradients]:
    """Of every layer. Where the device runs out of memory fewer images go through together.

    Raises LeanconvError where there are none, or no memory for those of one image."""
    batches = drawn(streams, IMAGES)
    if streams.cutting is not None and streams.cutting.one_by_one:
        batches = list(in_parts(batches, AT_ONCE))
    while True:
        try:
            with (
                streams.clock.stage(STAGE),
                streams.reporter.stage(STAGE, len(batches)) as stage,
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
            if not out_of_memory(error):
                raise
            most = max(batch.size for batch in batches) // 2
            if not most:
                raise LeanconvError(
                    f"there is no memory for those of a single image ({type(error).__name__})"
                ) from error
        batches = list(in_parts(batches, most))
        log.info("gradients of %d images at a time", most)


def split_losses(
    streams: Streams,
    spectra: Spectra,
    axis: Axis,
    ranks: dict[str, list[int]],
    step: Callable[[], None],
    *,
    corrected: bool,
    metrics: Mapping[str, Metric | None] | None = None,
) -> Iterator[tuple[str, Points]]:
    """(energy of filters lost, energy of responses lost) of every layer at these ``ranks``, on some patches.

    ``corrected``: a regression on half of the patches gives the second factor free filters, as the solver will, and the
    other half shows what is still lost. ``metrics``: of splits for what the layers see, and losses in these.
    """
    for name, some in ranks.items():
        found, energies = [], spectra.candidates[name].spectrum(axis)
        patches = spectra.patches(streams).get(name).y if some else None
        for rank in some:
            assert energies is not None
            assert patches is not None
            split = spectra.split(name, axis, rank, seen=metrics is not None)
            metric = None if metrics is None else metrics[name]
            loss = split_loss(spectra.dense[name], split, patches, metric, corrected=corrected)
            found.append((1.0 - energies.kept[rank], loss))
            step()
        yield name, tuple(found)


def split_loss(dense: Probe, split: TwoStep, patches: Tensor, metric: Metric | None, *, corrected: bool) -> float:
    """Share of the energy of the responses to ``patches`` (n x (c k)), in a ``metric``, that a split does not explain.
    ``corrected``: by a regression, where it helps: on few rows it may not."""
    geometry, half = dense.site.geometry, len(patches) // 2
    y = patches @ dense.weight.flatten(1).T
    x = split.seen(patches.reshape(len(patches), geometry.in_channels, *geometry.kernel))
    given = x @ split.second.flatten(1).T
    ways = [given[half:]]
    if corrected:
        space = ResponseSpace.behind(x[:half], split.second, split.first)
        ways.append(reduced_rank(y[:half], given[:half], geometry.channel_limit, space=space)(x[half:]))

    def energy(z: Tensor) -> float:
        return float((z if metric is None else z @ metric.root.T.to(z.dtype)).double().square().sum())

    y = y[half:]
    whole = energy(y - y.mean(0))
    return min(energy(y - way) for way in ways) / whole if whole > 0 else 0.0
