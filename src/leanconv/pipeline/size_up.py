"""How large the work is: threads that suit it, and about how long it will take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from leanconv.calibrate.batches import to_device
from leanconv.calibrate.streams import Streams
from leanconv.config import Options
from leanconv.network.sites import Site
from leanconv.pipeline.prepare import Prepared
from leanconv.pipeline.session import Session
from leanconv.system.precision import multiplies_bfloat16
from leanconv.system.random_state import untouched_rng

# Multiply-adds, at the rate of one large product. For a layer's n x d samples: n x d x (d + BESIDES), so many times;
# BESIDES is for what is done to single numbers. For k x k filters: (k d)^3 so many times.
FIT, BESIDES = {"linear": 8, "nonlinear": 25}, 500
QUICK = 10  # a nonlinear fit with products in bfloat16
EIGENVECTORS = 8
# Passes of the images: the original's, and the shorter one of the accelerated network.
PASSES = 1.5
# For gradients and patches: so many passes of up to so many images.
MORE, LOOKED_AT = 4, 128
ROWS, FILTERS = 4096, 256  # of the product that is timed


def size_up(session: Session, streams: Streams, prepared: Prepared, options: Options, *, last: bool) -> None:
    """Before the long work. ``last``: layers are fitted too, not only analyzed."""
    sites = prepared.sites.values()
    sizes = [(_rows(streams, site), site.geometry.out_channels) for site in sites]
    session.threads.suit(max(rows * filters**2 for rows, filters in sizes))
    if session.work is not None:
        session.work.threads = session.threads.count
    known = session.work is not None and session.work.described()[0]  # and perhaps fitted
    if not session.progress or session.device.type != "cpu" or known:  # a GPU takes seconds
        return
    image, product = _rates(streams, prepared.original)
    quick = options.closed_form and options.solver == "nonlinear" and multiplies_bfloat16(torch.empty(0))
    fit = QUICK if quick else FIT[options.solver]
    macs = 0
    for site, (rows, filters) in zip(sites, sizes, strict=True):
        macs += EIGENVECTORS * (max(site.geometry.kernel) * filters) ** 3
        if last and options.forms.fitted:
            macs += fit * rows * filters * (filters + BESIDES)
    images = streams.images * (PASSES if last else 1)
    if last and options.free_filters:
        images += MORE * min(streams.images, LOOKED_AT)
    seconds = images * image / streams.team.world + macs * product
    more = last and (options.refine == "distill" or options.ranks == "latency")
    threads = f"{session.threads.count} thread{'s' * (session.threads.count > 1)}"
    size = f"{prepared.survey.macs / 1e9:.3g} GMACs an image, {streams.images} images, {len(sites)} layers"
    session.reporter.say(f"{'at least' if more else 'about'} {in_words(seconds)} on {threads}: {size}")


def _rows(streams: Streams, site: Site) -> int:
    return streams.images * streams.positions.count(site.positions)


def _rates(streams: Streams, network: nn.Module) -> tuple[float, float]:
    """Seconds of an image, from a run on two, and of a multiply-add."""
    first = next(next(iter(streams.batches)).split())
    two = first.part(0, min(2, first.size))
    inputs = to_device(two.pieces[0], streams.device, channels_last=two.channels_last)
    samples, square = torch.ones(ROWS, FILTERS), torch.ones(FILTERS, FILTERS)
    with torch.no_grad(), untouched_rng(0):  # some networks draw random numbers
        return _seconds(lambda: network(inputs)) / two.size, _seconds(lambda: samples @ square) / (ROWS * FILTERS**2)


def _seconds(call: Callable[[], Any]) -> float:
    """The second time, when memory is there."""
    call()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def in_words(seconds: float) -> str:
    """
    >>> in_words(0.3), in_words(42), in_words(100), in_words(9000)
    ('1 s', '42 s', '2 min', '2.5 h')
    """
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
