"""The images of a run: those it is fitted to, and those that are held out to judge by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from leanconv.calibrate.batches import Batches, check_images, take
from leanconv.calibrate.detections import Detections
from leanconv.calibrate.memory import device_share
from leanconv.calibrate.prefetch import SHARE
from leanconv.config import Options
from leanconv.network.torchvision_detectors import kind_of, seen_as_tensors
from leanconv.network.user_model import copied
from leanconv.pipeline.prepare import Prepared, prepare
from leanconv.pipeline.session import Session

# Images that the result is checked on, and that nothing is fitted to or chosen by: this share of all, within these
# bounds; none of fewer than CHECK_FROM, which the fit needs more. 8 show a network that is ruined; with 128 the
# interval of an agreement is at most 17 points wide.
CHECK_SHARE, CHECK_LEAST, CHECK_MOST, CHECK_FROM = 0.1, 8, 128, 32


def check_count(images: int) -> int:
    """How many of so many images are held out."""
    return min(CHECK_MOST, max(CHECK_LEAST, round(CHECK_SHARE * images))) if images >= CHECK_FROM else 0


@dataclass(frozen=True)
class Given:
    """``fitted``: what everything is measured on. ``put_aside``: how many images are not among them. ``held_out``:
    those that the result is checked on, as inputs of the network, once all were read. ``judges``: images that decide
    when a distillation ends."""

    fitted: Batches
    put_aside: int
    held_out: list[Any]
    judges: Tensor | None = None

    @property
    def checked(self) -> int:
        """How many images are held out in this process."""
        return take(iter(self.held_out)).images if self.held_out else 0


def looked_at(model: nn.Module, images: Iterable[Any], options: Options, session: Session) -> tuple[Given, Prepared]:
    """The images as the network gets them, perhaps already on their way to a GPU, and what can be replaced."""
    distills = options.refine == "distill"
    if distills:
        from leanconv.train.distill import are_few, check_distillable, check_examples, put_aside

        check_distillable(model, session.team.world)
    if kind_of(model) is not None:
        return _seen_by_detector(model, images, options, session)
    given = _taken(images, options, session)
    batches = given.fitted
    few = distills and are_few(batches.images + given.put_aside)
    if not few:  # else some of these will not take part
        share = min(session.share, device_share(session.device, None))
        session.travel.send(batches, int(SHARE * share))
    prepared = prepare(model, batches.sample(), options, session.device)
    if distills:
        check_examples(prepared.original, prepared.sites, batches)
    if few:
        fitted, judges = put_aside(batches, options.seed)
        given = Given(fitted, given.put_aside + len(judges), given.held_out, judges)
    return given, prepared


def _seen_by_detector(
    model: nn.Module, images: Iterable[Any], options: Options, session: Session
) -> tuple[Given, Prepared]:
    check_images(images)
    detector = copied(model).eval().to(session.device)
    seen = Detections(detector, images, session.device)
    given = _taken(seen, options, session)
    real = seen.real(options.layers)
    seen_as_tensors(detector)
    return given, prepare(detector, given.fitted.sample(), options, session.device, real)


def _taken(images: Iterable[Any], options: Options, session: Session) -> Given:
    """This process's share of the images, without those held out."""
    batches = take(images, rank=session.team.rank, world=session.team.world, watch=session.watch)
    count = check_count(batches.images) if options.holds_out else 0
    if count:
        batches.put_aside(count, options.seed)
    return Given(batches, count, batches.aside)
