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
    """``count`` of the images, drawn by the seed, in batches as large as they are now; whole batches where images do
    mind their company. Of several processes, every one has its own."""
    generator = torch.Generator().manual_seed(streams.seed)
    batches = list(streams.batches)
    if streams.cutting is None or not streams.cutting.one_by_one:
        order = torch.randperm(len(batches), generator=generator).tolist()
        sizes = torch.tensor([batches[number].size for number in order]).cumsum(0)
        # As they were given: channels-last they have been seen to go through the network up to its last site only.
        batches = [batch.as_given() for batch in batches]
        return [batches[number] for number in order[: 1 + int((sizes < count).sum())]]
    pieces = [
        Batch(0, batch.size if len(batch.pieces) == 1 else len(piece), (piece,))
        for batch in batches
        for piece in batch.pieces
    ]
    images = [(piece, number) for piece in pieces for number in range(piece.size)]
    # Not sorted: whoever takes half of them has both halves from everywhere.
    order = torch.randperm(len(images), generator=generator)[:count].tolist()
    found = [images[at][0].part(images[at][1], images[at][1] + 1).pieces[0] for at in order]
    kinds = {(one.shape[1:], one.dtype) if isinstance(one, Tensor) else None for one in found}
    largest = max(batch.size for batch in batches) if len(kinds) == 1 and None not in kinds else 1
    groups = [found[first : first + largest] for first in range(0, len(found), largest)]
    return [Batch(number * largest, len(group), tuple(group)) for number, group in enumerate(groups)]


def collected(
    streams: Streams,
    images: list[Batch],
    probes: dict[str, Probe],
    rows: int,
    step: Callable[[], None] = lambda: None,
) -> Samples:
    """What ``probes`` collect in the original, about ``rows`` of every site and no more, at the same positions whatever
    they are. One pass of the images; ``step`` is called for every batch."""
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
