"""The one call, and its stages."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn

from leanconv.calibrate.memory import parse_memory
from leanconv.config import Distill, Options, Refine
from leanconv.forms import Form
from leanconv.pipeline.analysis import Analysis, analyze_model, reachable_speedup
from leanconv.pipeline.session import Session
from leanconv.ranks.select import Merit
from leanconv.ranks.selector import RankSelector
from leanconv.result import Accelerated

# Arguments of earlier releases, and what to write in their place.
OLD = {
    "steps": "refine=leanconv.Distill(steps=...)",
    "sweeps": "scheme=leanconv.ThreeD(sweeps=...)",
    "target": "ranks=leanconv.Latency(target=...)",
    "latency": "ranks=leanconv.Latency(ms=...)",
    "kernels": "leanconv.optimize_(result.model)",
}

# What differs from the defaults in the paper.
PAPER: dict[str, Any] = {"refine": "none", "ranks": "energy"}


def accelerate(
    model: nn.Module,
    images: Iterable[Any],
    speedup: float = 4.0,
    scheme: str | Form | Iterable[str | Form] = "3d",
    solver: Literal["linear", "nonlinear"] = "nonlinear",
    asymmetric: bool = True,
    ranks: str | Mapping[str, Any] | RankSelector | Merit = "auto",
    skip: Iterable[str] | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    progress: bool = True,
    workdir: str | os.PathLike[str] | None = None,
    *,
    layers: Literal["conv", "all"] = "conv",
    part: str | None = None,
    samples: int | Literal["auto"] = 50_000,
    memory: int | str | None = None,
    refine: Refine | Distill | None = None,
    threads: int | None = None,
    **old: Any,
) -> Accelerated:
    """Return a network that does the work of ``model`` with ``speedup`` times fewer multiply-accumulates.

    Args:
        model: the trained network. It is copied and never modified.
        images: batches ``model(batch)`` accepts, for example a DataLoader; labels are ignored. A few thousand
            images are plenty, a few hundred often enough. They are read once and kept in memory. From 32 on a tenth of
            them (8 to 128, drawn by the seed) is held out from everything, and ``result.check`` says how far the two
            networks are apart on these; with fewer, or the paper's fit, on some it was made with.
        speedup: convolution MACs before / after. Met exactly: ``speedup <= achieved < 1.02 * speedup``. With
            ``ranks="latency"``: time of the whole network before / after, as measured.
        scheme: ``"channel"`` (k x k, d') + (1 x 1, d); ``"spatial"`` (k x 1, d'') + (1 x k, d), weights only;
            ``"3d"`` (k x 1, d'') + (1 x k, d') + (1 x 1, d). ``ThreeD(sweeps=3)``: both halves of every split are
            fitted in turns to the original's responses before a layer is solved, in place of the split that is best
            for the filters alone; one more pass of 512 images, and the time of the sums. Or a tuple of forms.
        solver: ``"linear"`` fits responses; ``"nonlinear"`` fits what is left of them behind the activation.
        asymmetric: fit each layer to the input the layers already accelerated give it, so errors do not pile up.
        ranks: ``"auto"``, the default, is ``"sensitivity"`` where that is possible: it measures, by gradients, how far
            errors of every layer move the network's output, and chooses forms and ranks that together move it least.
            ``"energy"`` keeps the largest product of PCA energies; ``"uniform"`` gives every layer the same speed-up;
            ``"latency"``, or ``Latency(ms=20, target=Target(...))``, times the forms of every layer on a target and
            keeps the most energy in that time; ranks by hand, ``{"layer": d'}`` (``(d'', d')`` for 3d), and ``speedup``
            is not used; a selector of yours, or a function ``merit(candidate, choice)`` whose sum over the layers is to
            be largest.
        skip: names of layers to leave alone. Default: the first convolution. ``[]`` skips nothing.
        seed: chooses the sampled positions. Same seed, same machine, same ``threads``: same result, bit for bit.
        device: where to compute; default: where the model is.
        progress: show progress on stderr.
        workdir: a folder for the state of the run. A run that was killed goes on from there when it is called again
            with the same arguments, and ends in the same bits; a later run with another ``speedup``, ``scheme`` or
            solver uses what was measured (but where ``refine`` is fitted to another part of the images, as
            ``"none"`` is to all: that is measured anew, and takes its place). About 4 bytes x ``samples`` x filters on
            disk, and with ``refine="distill"`` five times the weights.
        layers: ``"conv"``, or ``"all"`` to accelerate and count Linear layers too.
        samples: responses sampled a layer, spread over the images. ``"auto"``: up to 200,000, of which each layer is
            fitted to as many as it needs, by its error on images held out. The result says who had not enough
            of them, either way.
        memory: what the run may keep in memory beside the model and one batch at work, in bytes or as ``"8GB"``;
            default: half of what is free. With less the run takes longer and the result is the same.
        part: path of the module to accelerate, for example ``"backbone"``; only its MACs count then.
        refine: ``"closed-form"``, the default of 3d and channel, holds out an eighth of the images while a layer is
            fitted, and lets them say how far to trust the others; of 3d the (1 x k, d') filters are fitted freely to
            what they see in the accelerated network, in place of mixtures of the old ones. ``"none"`` is the paper's
            fit, to all images, which usually does worse on images not seen; in small networks its solve is quicker.
            ``"distill"`` (any scheme) does so and then trains the network on the images, without labels, to have the
            original's feature maps: on a tenth of those it is judged, and the best that was seen there is kept. Of
            fewer than 500 images the layers are not fitted to that tenth either. Much longer; how it went is in
            ``result.training``. ``Distill(steps=1200)``: steps of training at most, to the end of an epoch; it ends
            where images held out gain no more.
        threads: CPU threads torch computes with while this runs; how many it has before is put back. Default: as many
            as there are cores that no other process keeps busy, looked at again after every layer, and one for a small
            network; with a ``workdir`` as many as its run began with, so that one that goes on ends in the same bits
            (another number rounds otherwise in the last bits). A number given to torch counts as given here
            (OMP_NUM_THREADS, ``torch.set_num_threads``).

    The network's own forward runs on the first two images, on 128 that show what its output feels, and at the end on
    those held out. For all images, and for both networks, a recorded list of its operations is run (docs/streams.md).
    Networks that cannot be recorded are run as they are, and a warning says so.

    One of torchvision's detectors takes batches that are lists of images (3 x H x W, any sizes). What lies behind its
    proposals is fitted on the same boxes in both networks: those of the original.

    Under an initialised ``torch.distributed`` process group every process makes this call with the same arguments;
    they share the images out and all return the same network.

    Raises:
        LeanconvError: for anything wrong with the arguments, in one sentence. It is a ValueError.

    Examples:
        >>> import leanconv, torch
        >>> network, images = leanconv.models.character_cnn(), torch.rand(16, 1, 24, 24)
        >>> result = leanconv.accelerate(network, images, speedup=2, samples=500, progress=False)
        >>> 2 <= result.speedup < 2.04
        True
        >>> result.model(images).shape
        torch.Size([16, 36])
    """
    kernels = old.pop("kernels", "none")
    for name in old:
        if name not in OLD:
            raise TypeError(f"accelerate() got an unexpected keyword argument {name!r}")
    for name in [*old, *(["kernels"] if kernels != "none" else [])]:
        warnings.warn(f"{name}= is going; write {OLD[name]} instead.", FutureWarning, stacklevel=2)
    if kernels != "none":
        from leanconv.kernels.optimize import apply, check_kernels

        check_kernels(kernels)  # before long work
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
        part=part,
        refine=refine,
        **old,
    )
    limit = parse_memory(memory)
    session = Session(model, device, options.seed, progress=progress, workdir=workdir, limit=limit, threads=threads)
    result = accelerate_as(model, images, options, session)
    if kernels != "none":
        apply(result.model, kernels)
    return result


def paper(model: nn.Module, images: Iterable[Any], speedup: float = 4.0, **arguments: Any) -> Accelerated:
    """``accelerate`` as the paper of 2015 does it: fitted to all samples, ranks by energy. Other arguments as there.

    Examples:
        >>> import leanconv, torch
        >>> network, images = leanconv.models.character_cnn(), torch.rand(16, 1, 24, 24)
        >>> leanconv.paper(network, images, 2, samples=500, progress=False).options.refine
        'none'
    """
    return accelerate(model, images, speedup, **{**PAPER, **arguments})


def accelerate_as(model: nn.Module, images: Iterable[Any], options: Options, session: Session) -> Accelerated:
    """The stages one after the other, with arguments that were checked."""
    with analyze_model(model, images, options, session, last=True) as analysis:
        return analysis.apply(analysis.plan())


def analyze(
    model: nn.Module,
    images: Iterable[Any],
    scheme: str | Form | Iterable[str | Form] = "3d",
    skip: Iterable[str] | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    progress: bool = True,
    workdir: str | os.PathLike[str] | None = None,
    *,
    layers: Literal["conv", "all"] = "conv",
    part: str | None = None,
    samples: int | Literal["auto"] = 50_000,
    memory: int | str | None = None,
    threads: int | None = None,
) -> Analysis:
    """The first stage of ``accelerate``: look at the network and run it over the images. Then ``.plan(speedup)``
    chooses ranks, as often as wanted, and ``.apply(plan)`` makes the network. Arguments as for ``accelerate``.

    Examples:
        >>> import leanconv, torch
        >>> network, images = leanconv.models.character_cnn(), torch.rand(16, 1, 24, 24)
        >>> analysis = leanconv.analyze(network, images, samples=500, progress=False)
        >>> plan = analysis.plan(2)
        >>> 2 <= plan.speedup < 2.04
        True
        >>> result = analysis.apply(plan)
        >>> result.speedup == plan.speedup
        True
    """
    options = Options.check(scheme=scheme, skip=skip, seed=seed, layers=layers, part=part, samples=samples)
    limit = parse_memory(memory)
    session = Session(model, device, options.seed, progress=progress, workdir=workdir, limit=limit, threads=threads)
    return analyze_model(model, images, options, session, last=False)


def reachable(
    model: nn.Module,
    images: Iterable[Any],
    scheme: str | Form | Iterable[str | Form] = "3d",
    skip: Iterable[str] | None = None,
    device: torch.device | str | None = None,
    *,
    layers: Literal["conv", "all"] = "conv",
    part: str | None = None,
) -> float:
    """The largest ``speedup`` that ``accelerate`` can be asked for, with every rank at 1; one image is enough.

    It says how much of the network can be made cheaper, not what is wise. Arguments as for ``accelerate``.

    Examples:
        >>> import leanconv, torch
        >>> leanconv.reachable(leanconv.models.character_cnn(), torch.rand(1, 1, 24, 24)) > 4
        True
    """
    options = Options.check(scheme=scheme, skip=skip, layers=layers, part=part)
    session = Session(model, device, options.seed)
    try:
        return reachable_speedup(model, images, options, session)
    finally:
        session.close()
