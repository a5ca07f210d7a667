"""Some of the calibration images, and what the original's layers do there."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from leanconv.calibrate.batches import Batch
from leanconv.calibrate.observe import observe
from leanconv.calibrate.positions import Positions
from leanconv.calibrate.probes import Probe, Responses
from leanconv.calibrate.samples import Samples
from leanconv.calibrate.streams import Streams
from leanconv.solve import thinned


def drawn(streams: Streams, count: int) -> list[Batch]:
    """``count`` of this process's images, drawn by the seed, in batches as large as they are now; whole batches where
    the result for an image depends on the others."""
    generator = torch.Generator().manual_seed(streams.seed)
    batches = list(streams.batches)
    if streams.cutting is None or not streams.cutting.one_by_one:
        order = torch.randperm(len(batches), generator=generator).tolist()
        sizes = torch.tensor([batches[index].size for index in order]).cumsum(0)
        # As they were given: whether the network takes channels-last maps was tried up to its last site only.
        return [batches[index].as_given() for index in order[: 1 + int((sizes < count).sum())]]
    places = [(piece, index) for batch in batches for piece in batch.split() for index in range(piece.size)]
    # Not sorted: who takes half of them gets images from everywhere.
    order = torch.randperm(len(places), generator=generator)[:count].tolist()
    images = [piece.part(index, index + 1).pieces[0] for piece, index in (places[at] for at in order)]
    kinds = {(image.shape[1:], image.dtype) if isinstance(image, Tensor) else None for image in images}
    largest = max(batch.size for batch in batches) if len(kinds) == 1 and None not in kinds else 1
    groups = [tuple(images[first : first + largest]) for first in range(0, len(images), largest)]
    return [Batch(index * largest, len(group), group) for index, group in enumerate(groups)]


def collected(
    streams: Streams,
    images: list[Batch],
    probes: dict[str, Probe],
    rows: int,
    step: Callable[[], None] = lambda: None,
) -> Samples:
    """What ``probes`` collect in the original, at most about ``rows`` of every site, at the same positions for all
    probes. One pass of the images; ``step`` is called for every batch."""
    count = sum(batch.size for batch in images)
    positions = Positions(per_image=max(1, -(-rows // count)), images=count, seed=streams.seed, device=streams.device)
    each = {name: positions.count(probe.site.positions) for name, probe in probes.items()}
    samples = Samples(streams.memory)
    for name, probe in probes.items():
        samples.expect(name, rows=count * each[name], width=probe.width, dtype=probe.weight.dtype, adds=False)
    sizes = {batch.first: batch.size for batch in images}

    def take(name: str, first: int, responses: Responses) -> None:
        y, most = responses.y, sizes[first] * each[name]
        if len(y) > most:  # a layer that runs on several maps, or on other rows than images, such as boxes
            y = y[thinned(len(y), most).to(y.device)]
        samples.add(name, Responses(y))

    device = streams.device
    observe(streams.original, images, list(probes.values()), positions=positions, device=device, take=take, step=step)
    return samples
