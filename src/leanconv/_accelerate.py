"""The one call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from leanconv.calibrate.batches import take
from leanconv.entrance import check_model, device_of, parse_device, untouched_rng
from leanconv.errors import LeanconvError
from leanconv.job import Job
from leanconv.network.geometry import Scheme
from leanconv.options import Options
from leanconv.progress import reporter
from leanconv.result import Accelerated


def accelerate(
    model: nn.Module,
    images: Iterable[Any],
    speedup: float = 4.0,
    scheme: Scheme = "3d",
    solver: Literal["linear", "nonlinear"] = "nonlinear",
    asymmetric: bool = True,
    ranks: Literal["uniform", "energy"] | Mapping[str, Any] = "energy",
    skip: Iterable[str] | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    progress: bool = True,
    workdir: str | None = None,
    *,
    layers: Literal["conv", "all"] = "conv",
    samples: int = 50_000,
) -> Accelerated:
    """Return a network that does the work of ``model`` with ``speedup`` times fewer multiply-accumulates.

    Args:
        model: the trained network. It is copied and never modified.
        images: batches ``model(batch)`` accepts, for example a DataLoader; labels are ignored. A few thousand
            images are plenty, a few hundred often enough. They are read once and kept in memory.
        speedup: convolution MACs before / after. Met exactly: ``speedup <= achieved < 1.02 * speedup``.
        scheme: ``"channel"`` (k x k, d') + (1 x 1, d); ``"spatial"`` (k x 1, d'') + (1 x k, d), weights only;
            ``"3d"`` (k x 1, d'') + (1 x k, d') + (1 x 1, d).
        solver: ``"linear"`` fits responses; ``"nonlinear"`` fits what is left of them behind the activation.
        asymmetric: fit each layer to the input the layers already accelerated give it, so errors do not pile up.
        ranks: ``"energy"`` keeps the largest product of PCA energies; ``"uniform"`` gives every layer the same
            speed-up; or ranks by hand, ``{"layer": d'}`` (``(d'', d')`` for 3d), and ``speedup`` is not used.
        skip: names of layers to leave alone. Default: the first convolution. ``[]`` skips nothing.
        seed: chooses the sampled positions. Same seed, same machine: same result, bit for bit.
        device: where to compute; default: where the model is.
        progress: show progress on stderr.
        workdir: reserved for resumable state; must be None in this version.
        layers: ``"conv"``, or ``"all"`` to accelerate and count Linear layers too.
        samples: responses sampled a layer, spread over the images.

    Raises:
        LeanconvError: for anything wrong with the arguments, in one sentence. It is a ValueError.
    """
    options = Options.check(
        speedup=speedup,
        scheme=scheme,
        solver=solver,
        asymmetric=asymmetric,
        ranks=ranks,
        skip=skip,
        layers=layers,
        samples=samples,
        seed=seed,
    )
    if workdir is not None:
        raise LeanconvError(f"workdir={workdir!r}: resumable runs are not available in this version; leave it out.")
    with _job(model, images, options, device, progress) as job:
        return job.run(device_of(model))


def reachable(
    model: nn.Module,
    images: Iterable[Any],
    scheme: Scheme = "3d",
    skip: Iterable[str] | None = None,
    device: torch.device | str | None = None,
    *,
    layers: Literal["conv", "all"] = "conv",
) -> float:
    """The largest ``speedup`` that ``accelerate`` can be asked for, with every rank at 1; one image is enough.

    It says how much of the network can be made cheaper, not what is wise. Arguments as for ``accelerate``.
    """
    options = Options.check(scheme=scheme, skip=skip, layers=layers)
    with _job(model, images, options, device, progress=False) as job:
        return job.reachable()


@contextmanager
def _job(
    model: nn.Module, images: Iterable[Any], options: Options, device: torch.device | str | None, progress: bool
) -> Iterator[Job]:
    """A job at the door: the model checked, random states put back at the end."""
    check_model(model)
    place = device_of(model) if device is None else parse_device(device)
    # A caller in inference mode still gets a network that can be trained.
    with untouched_rng(options.seed), torch.inference_mode(False):
        yield Job.prepare(model, take(images), options, place, reporter(progress))
