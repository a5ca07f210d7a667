"""Two streams of images, through the original and through the accelerated network, and the responses seen along them.

The original runs once and leaves sampled responses of every site. The accelerated network runs once too, stopping at
each site until that has been replaced (``streaming.passes``). The images are shared out over the processes of a
job, whose main one gets all responses.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from leanconv.calibrate.batches import Batch, Batches, joined, log, out_of_memory
from leanconv.calibrate.memory import Memory
from leanconv.calibrate.observe import Seen, observe, see
from leanconv.calibrate.positions import Positions
from leanconv.calibrate.prefetch import Inputs, Travel
from leanconv.calibrate.probes import Probe, Responses
from leanconv.calibrate.processes import Processes
from leanconv.calibrate.samples import Piece, Samples, join_pieces
from leanconv.calibrate.streaming.partition import Cutting, cutting, suits_channels_last
from leanconv.calibrate.streaming.passes import Cut, Pass, Rerun, Source, Walk
from leanconv.calibrate.streaming.replay import CannotCut, Scripts
from leanconv.calibrate.streaming.tape import Tapes
from leanconv.errors import LeanconvError
from leanconv.network.user_model import copied
from leanconv.progress import Progress
from leanconv.solve import thinned
from leanconv.system.stage_clock import Clock

Result = TypeVar("Result")

# On a CPU batches are cut so that the largest tensor of a pass has at most so many bytes. Larger ones go back to the
# system at once (see system.process_memory); for small batches convolutions find their weights in a better order.
CACHED = 32 << 20
# On a GPU they are joined until it has about so many, if the GPU has memory for many such.
LAUNCH = 1 << 30
SEVERAL = 6  # batches there should be then: while the first one is read and sent the GPU has nothing to do;
AT_HAND = 3  # so many where images were read before, and are sent already


class SampleStore(Protocol):
    """Where the original's responses are kept beyond this process."""

    @property
    def samples(self) -> Path:
        """The folder they are in."""

    def new_samples(self) -> AbstractContextManager[Path]:
        """A folder to write new ones to; it becomes ``samples`` when the block ends well, with ``describe`` before."""

    def describe(self, sites: dict[str, Any], largest: int | None, images: int) -> None:
        """What the files are, what batches were cut to and how many images there were."""

    def described(self) -> tuple[dict[str, Any], int | None, int | None]:
        """The same of an earlier process; nothing where there is nothing."""


@dataclass
class Streams:
    original: nn.Module
    batches: Batches
    seed: int
    samples: int  # positions looked at a layer
    memory: Memory
    travel: Travel
    team: Processes
    store: SampleStore | None
    clock: Clock
    reporter: Progress
    cutting: Cutting | None = None
    tapes: Tapes = field(default_factory=Tapes)

    def __post_init__(self) -> None:
        self.device = self.memory.device
        self.inputs = Inputs(self.memory, self.travel)
        self.images = self.batches.images  # without those that cannot be read, once all were asked for: see targets
        per_image = max(1, -(-self.samples // self.batches.images))
        self.positions = Positions(per_image=per_image, images=self.batches.images, seed=self.seed, device=self.device)

    @cached_property
    def accelerated(self) -> nn.Module:
        """The network that is being made: a copy of the original that shares its weights."""
        return copied(self.original, share=True)

    def begin_again(self, memory: Memory) -> None:
        """With a new copy of the original, for another plan."""
        self.__dict__.pop("accelerated", None)
        self.memory, self.inputs = memory, Inputs(memory, self.travel)

    def _source(self) -> Source:
        return Source(self.batches, self.positions, self.memory, self.inputs)

    def look(self, probes: list[Probe]) -> None:
        """Find out how the network can be run. ``probes``: of all sites."""
        self._sites = [probe.site for probe in probes]
        with self.clock.stage("preparing"):
            sample = self.batches.sample()
            plain: dict[str, Seen] = {}  # of one run, however often it is compared with
            result = self._channels_last(sample, probes, plain)
            last = result is not None
            self.batches.channels_last(sample if last else None)
            self.cutting = result = result or cutting(self.original, sample, probes, self.device, plain)
            if result.tape is not None:
                self.tapes = Tapes(result.tape, Batch(0, len(sample), (sample,), last))
            if result.one_by_one and result.largest:
                self._regroup(result.largest)

    def _channels_last(self, sample: Any, probes: list[Probe], plain: dict[str, Seen]) -> Cutting | None:
        """How the network can be run on channels-last images, where that suits the device and every process."""
        result: Cutting | None = None
        if suits_channels_last(sample, probes, self.device):
            with suppress(LeanconvError):  # a network that views its maps in another way does not take them
                result = cutting(self.original, sample, probes, self.device, plain, True)
        possible = result is not None and result.reason is None
        return result if all(self.team.all_gather(possible)) else None

    def _regroup(self, largest: int) -> None:
        """Batches of a size that suits the device, where the answer for an image does not depend on the others."""
        if self.device.type == "cpu":
            # Tensors that stay in the cache, and in memory the allocator keeps, make a pass faster.
            self.batches.cut(1 << max(0, (CACHED // largest).bit_length() - 1))
        elif self.device.type == "cuda":
            # Few large launches: Python takes longer to ask for a small one than the GPU to do it.
            there = torch.cuda.get_device_properties(self.device).total_memory
            several = AT_HAND if self.batches.read_at_once else SEVERAL
            few = -(-self.batches.images // (several * self.team.world))
            self.batches.join(max(1, min(min(LAUNCH, there // 64) // largest, few)))

    def targets(self, probes: list[Probe]) -> Samples:
        """Responses of the original network; at the main process, the others have none."""
        known, largest, images = ({}, None, None) if self.store is None else self.store.described()
        names = [probe.site.name for probe in probes]
        if self.team.broadcast(all(name in known for name in names)):
            self.images = self.team.broadcast(images) or self.images
            if largest := self.team.broadcast(largest):  # batches as they were; a GPU was short of memory
                self.batches.cut(largest)
                self.inputs.drop_all()
            if self.store is None:  # the main process has them
                return Samples(self.memory)
            return Samples.stored(self.memory, self.store.samples, {name: known[name] for name in names})
        if self.store is None:
            return self._new_targets(probes, None)
        with self.store.new_samples() as folder:
            targets = self._new_targets(probes, folder)
            self.store.describe(targets.facts(), self.batches.largest, self.images)
        return targets

    def _new_targets(self, probes: list[Probe], folder: Path | None) -> Samples:
        targets = self.responses(self.original, probes, "original network", folder)
        self.images = sum(self.team.all_gather(self.batches.there))
        return targets

    def responses(self, network: nn.Module, probes: list[Probe], title: str, folder: Path | None = None) -> Samples:
        """Responses of ``probes`` over all images, at the main process. Where the device runs out of memory images are
        kept there no more, then batches are halved, and the pass begins anew: responses computed in other batches are
        not quite the same."""
        while True:
            samples = Samples(self.memory, folder)
            try:
                with self.clock.stage(title):
                    self._observe(network, probes, title, samples)
                return samples
            except Exception as error:
                samples.close()
                if self.team.world > 1 or not out_of_memory(error):
                    raise
                if not self.inputs.drop_all() and not self.batches.halve():
                    raise

    def _observe(self, network: nn.Module, probes: list[Probe], title: str, samples: Samples) -> None:
        """Collect responses into the ``samples`` of the main process."""
        assert self.cutting is not None
        alone = self.team.world == 1
        if self.team.is_main:
            for probe in probes:
                samples.expect(probe, self._rows(probe), adds=bool(probe.site.adds))
        mine: dict[str, list[Piece]] = {probe.site.name: [] for probe in probes}

        def take(name: str, first: int, responses: Responses) -> None:
            if alone:
                samples.add(name, responses)
            else:
                mine[name].append((first, responses))

        cut = self.cutting.reason is None and network is self.original
        walk = Walk(network, self._source(), Scripts(self.tapes, self._sites, set(mine)), probes)
        with torch.no_grad(), self.reporter.stage(title, self.batches.steps) as stage:
            for batch in self.batches:
                if cut and walk.knows(batch):
                    for name, responses in walk(batch):
                        take(name, batch.first, responses)
                else:
                    observe(
                        network,
                        [batch],
                        probes,
                        positions=self.positions,
                        device=self.device,
                        take=take,
                        tapes=self.tapes if cut else None,
                        inputs=self.inputs,
                    )
                stage.advance()
        _ = self.accelerated  # copied while the device is still at work
        if not alone:
            for name in list(mine):
                for _, responses in self.team.gather(mine.pop(name)):
                    samples.add(name, responses)

    def _rows(self, probe: Probe) -> int:
        """About how many responses are sampled at a site."""
        return self.batches.images * self.positions.count(probe.site.positions)

    def respond(
        self, probes: dict[str, Probe], dense: list[Probe], done: Container[str], step: Callable[[], None]
    ) -> Iterator[tuple[int, str, Responses | None]]:
        """Every site that is not ``done``, shallow to deep: its number, its name and what its probe responds in the
        accelerated network as it stands; the responses at the main process only. The caller puts the site's factors
        into ``accelerated`` before it asks for the next.

        ``dense``: the original's probes of all sites, also of those that stay as they are. ``step``: called for every
        batch.
        """
        with self.clock.stage("accelerated network"):
            passing = self._pass(probes, dense)
        for number, name in enumerate(passing.order, 1):
            if name in done:
                continue
            with self.clock.stage("accelerated network"):
                responses = [self._join(passing.pieces(probes[name], step), self._rows(probes[name]))]
            yield number, name, responses.pop()  # nothing here holds on to it: it is large

    def _join(self, pieces: Iterable[Piece], rows: int) -> Responses | None:
        """The pieces of all processes as one, at the main process."""
        if self.team.world > 1:
            pieces = self.team.gather(list(pieces))
        return join_pieces(pieces, rows) if self.team.is_main else None

    def _pass(self, probes: dict[str, Probe], dense: list[Probe]) -> Pass:
        """A pass of the accelerated network, cut into parts where it can be, the same way on every process."""
        assert self.cutting is not None
        reason = self.cutting.reason
        cut: Cut | None = None
        if reason is None:
            try:
                for batch in self.batches:
                    if self.tapes.get(batch) is None:
                        see(self.original, batch, dense, self.device, tapes=self.tapes, copy=False)
                scripts = Scripts(self.tapes, [probe.site for probe in dense], set(probes))
                cut = Cut(self.accelerated, self._source(), scripts)
            except CannotCut as error:
                reason = str(error)
        reasons = [reason for reason in self.team.all_gather(reason) if reason is not None]
        if cut is not None and not reasons:
            return cut
        if self.team.is_main:
            log.warning(
                "this network cannot be stopped between its layers (%s); it is run again for every layer, which takes "
                "longer.",
                reasons[0],
            )
        return Rerun(self.accelerated, self._source(), list(probes))


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


def in_parts(images: list[Batch], most: int) -> Iterator[Batch]:
    """Every batch as batches of up to ``most`` images."""
    for batch in images:
        group: list[Batch] = []
        for piece in batch.split():
            for begin in range(0, piece.size, most):
                part = piece.part(begin, min(begin + most, piece.size))
                if sum(one.size for one in group) + part.size > most:
                    yield joined(group)
                    group = []
                group.append(part)
        yield joined(group)


def as_fits(images: list[Batch], run: Callable[[list[Batch]], Result]) -> Result:
    """What ``run`` makes of the images: where the device runs out of memory, in batches half as large."""
    while True:
        try:
            return run(images)
        except Exception as error:
            most = max((batch.size for batch in images), default=1) // 2
            if not out_of_memory(error) or not most:
                raise
        log.info("out of memory; going on with %d of some images at a time", most)
        images = list(in_parts(images, most))


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

    def run(images: list[Batch]) -> Samples:
        samples = Samples(streams.memory)
        for name, probe in probes.items():
            samples.expect(probe, count * each[name], adds=False)
        sizes = {batch.first: batch.size for batch in images}

        def take(name: str, first: int, responses: Responses) -> None:
            y, most = responses.y, sizes[first] * each[name]
            if len(y) > most:  # a layer that runs on several maps, or on other rows than images, such as boxes
                y = y[thinned(len(y), most).to(y.device)]
            samples.add(name, Responses(y))

        some, device = list(probes.values()), streams.device
        try:
            observe(streams.original, images, some, positions=positions, device=device, take=take, step=step)
        except BaseException:
            samples.close()
            raise
        return samples

    return as_fits(images, run)
