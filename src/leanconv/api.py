"""The one call."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from leanconv.calibrate.batches import Batches, take
from leanconv.calibrate.detections import Detections
from leanconv.calibrate.image_arguments import check_images
from leanconv.calibrate.memory import Memory, device_share, parse_memory
from leanconv.calibrate.prefetch import SHARE, travelling
from leanconv.calibrate.processes import Team
from leanconv.config import Options, Refine
from leanconv.kernels.optimize import Kernels, apply, check_kernels
from leanconv.network.layers.geometry import Scheme
from leanconv.network.torchvision_detectors import kind_of, seen_as_detector, seen_as_tensors
from leanconv.network.user_model import check_model, copied, device_of, parse_device
from leanconv.pipeline.engine import Engine
from leanconv.pipeline.run import Job
from leanconv.progress import reporter
from leanconv.result import Accelerated
from leanconv.runtimes.target import Target
from leanconv.storage.workdir import Workdir, digest_of_images, digest_of_model
from leanconv.system.process_memory import heap_at_hand, quiet_collector
from leanconv.system.random_state import untouched_rng
from leanconv.system.stage_clock import Clock
from leanconv.train.distill import are_few, check_distillable, check_examples, distilled, joined, put_aside


def accelerate(
    model: nn.Module,
    images: Iterable[Any],
    speedup: float = 4.0,
    scheme: Scheme = "3d",
    solver: Literal["linear", "nonlinear"] = "nonlinear",
    asymmetric: bool = True,
    ranks: Literal["uniform", "energy", "sensitivity", "latency"] | Mapping[str, Any] = "energy",
    skip: Iterable[str] | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    progress: bool = True,
    workdir: str | os.PathLike[str] | None = None,
    *,
    layers: Literal["conv", "all"] = "conv",
    samples: int | Literal["auto"] = 50_000,
    memory: int | str | None = None,
    part: str | None = None,
    refine: Refine | None = None,
    steps: int | None = None,
    sweeps: int = 0,
    target: Target | None = None,
    latency: float | None = None,
    kernels: Kernels = "none",
) -> Accelerated:
    """Return a network that does the work of ``model`` with ``speedup`` times fewer multiply-accumulates.

    Args:
        model: the trained network. It is copied and never modified.
        images: batches ``model(batch)`` accepts, for example a DataLoader; labels are ignored. A few thousand
            images are plenty, a few hundred often enough. They are read once and kept in memory.
        speedup: convolution MACs before / after. Met exactly: ``speedup <= achieved < 1.02 * speedup``. With
            ``ranks="latency"``: time of the whole network before / after, as measured.
        scheme: ``"channel"`` (k x k, d') + (1 x 1, d); ``"spatial"`` (k x 1, d'') + (1 x k, d), weights only;
            ``"3d"`` (k x 1, d'') + (1 x k, d') + (1 x 1, d).
        solver: ``"linear"`` fits responses; ``"nonlinear"`` fits what is left of them behind the activation.
        asymmetric: fit each layer to the input the layers already accelerated give it, so errors do not pile up.
        ranks: ``"energy"`` keeps the largest product of PCA energies; ``"uniform"`` gives every layer the same
            speed-up; ``"sensitivity"`` measures what approximating every layer alone does to the network's output and
            chooses forms and ranks that together change it least; ``"latency"`` times the forms of every layer on
            ``target`` and keeps the most energy in that time; or ranks by hand, ``{"layer": d'}``
            (``(d'', d')`` for 3d), and ``speedup`` is not used.
        skip: names of layers to leave alone. Default: the first convolution. ``[]`` skips nothing.
        seed: chooses the sampled positions. Same seed, same machine: same result, bit for bit.
        device: where to compute; default: where the model is.
        progress: show progress on stderr.
        workdir: a folder for the state of the run. A run that was killed goes on from there when it is called again
            with the same arguments, and ends in the same bits; a later run with another ``speedup``, ``scheme`` or
            solver uses what was measured (but for fewer than 500 images and ``refine="distill"``, which fits to a part
            of them: that is measured anew, and takes its place). About 4 bytes x ``samples`` x filters on disk, and
            with ``refine="distill"`` five times the weights.
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
            fit, which usually does worse on images not seen; in small networks its solve is quicker.
            ``"distill"`` (any scheme) does so and then trains the network on the images, without labels, to have the
            original's feature maps: on a tenth of them it is judged, and the best that was seen there is kept. Of fewer
            than 500 images the layers are not fitted to that tenth either. Much longer; how it went is in
            ``result.training``.
        steps: for ``refine="distill"``, steps of training at most, to the end of an epoch: it ends where images held
            out gain no more. Default: about 1,200, in at most 100 epochs.
        sweeps: for 3d, how many times the (k x 1) and the (1 x k) filters of every split are fitted in turns to the
            original's responses before the layer is solved, in place of the split that is best for the filters
            alone. 3 are enough. Ranks are chosen as without. One more pass of 512 images, and the time of the sums.
        target: for ``ranks="latency"``, what is timed: runtime, device, threads, batch and dtype. Default: torch where
            the model is, one thread, one image.
        latency: for ``ranks="latency"``, milliseconds the whole network is to take, in place of ``speedup``.
        kernels: ``"auto"`` ends with ``optimize_(result.model)`` where the network is on an NVIDIA GPU and Triton is
            installed. The result is saved as it is without: what is stored are the factors.

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
        steps=steps,
        sweeps=sweeps,
        target=target,
        latency=latency,
    )
    limit = parse_memory(memory)
    check_kernels(kernels)
    with _entered(model, options, device) as place:
        team = Team(place)
        clock = Clock(place)
        with team.ending_all(), travelling(place) as travel:
            share = device_share(place, limit)
            with clock.stage("preparing"):

                def set_out(batches: Batches) -> None:
                    if not (options.refine == "distill" and are_few(batches.images)):  # some will not take part
                        travel.send(batches, int(SHARE * min(share, device_share(place, None))))

                given, job = _prepared(model, images, options, place, team, set_out)
                batches, judges = given, None
                if options.refine == "distill" and are_few(given.images):
                    batches, judges = put_aside(given, options.seed)
                team.same("arguments", [options.to_json(), workdir is None])
                team.same("images", batches.images)
                if team.world > 1:
                    team.same("weights", digest_of_model(model))
            with _opened(workdir, team) as work:
                if workdir is not None:
                    with clock.stage("opening the workdir"):
                        _begin(work, model, given, batches, options, team, place)
                del given  # with few images to distil from, others than those that are left

                def room() -> Memory:
                    """Of what is free now, but for what has set out before it was asked."""
                    folder = None if work is None else work.folder
                    return Memory(place, limit, folder, share if travel.bytes else None)

                result = job.run(
                    Engine(
                        original=job.original,
                        batches=batches,
                        options=options,
                        memory=room(),
                        travel=travel,
                        team=team,
                        work=work,
                        clock=clock,
                        reporter=reporter(progress and team.lead),
                    )
                )
                if kind_of(model) is not None:
                    seen_as_detector(result.model)
                result.model.to(device_of(model))
                travel.end()
                if options.refine == "distill":
                    with clock.stage("distilling"):
                        result = distilled(
                            result,
                            model,
                            joined(batches, room()),
                            judges,
                            steps=options.steps,
                            seed=options.seed,
                            device=place,
                            workdir=None if work is None else work.distilling,
                            progress=progress,
                        )
                apply(result.model, kernels)
                if work is not None:
                    work.finish()
                return result


@contextmanager
def _opened(workdir: str | os.PathLike[str] | None, team: Team) -> Iterator[Workdir | None]:
    """The lead's work folder; the others keep nothing."""
    work = Workdir(workdir) if workdir is not None and team.lead else None
    try:
        yield work
    finally:
        if work is not None:
            work.close()


def _begin(
    work: Workdir | None,
    model: nn.Module,
    given: Batches,
    fitted: Batches,
    options: Options,
    team: Team,
    device: torch.device,
) -> None:
    """Check the arguments against what the folder holds. ``fitted``: what is left of the images ``given``."""
    shares = team.words(digest_of_images(given))
    if work is not None:
        images = hashlib.sha256(repr(sorted(item for share in shares for item in share)).encode()).hexdigest()
        facts = {"model": digest_of_model(model), "images": images, "device": device.type}
        work.begin({**facts, "all images": fitted is given}, options)


def reachable(
    model: nn.Module,
    images: Iterable[Any],
    scheme: Scheme = "3d",
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
    with _entered(model, options, device) as place:
        return _prepared(model, images, options, place)[1].reachable()


def _prepared(
    model: nn.Module,
    images: Iterable[Any],
    options: Options,
    place: torch.device,
    team: Team | None = None,
    set_out: Callable[[Batches], None] = lambda batches: None,
) -> tuple[Batches, Job]:
    """The images as the network is given them, which may ``set_out`` for the device before the network is looked at,
    and what is to be done."""
    rank, world = (team.rank, team.world) if team else (0, 1)
    if options.refine == "distill":
        check_distillable(model, world)
    if kind_of(model) is None:
        batches = take(images, rank=rank, world=world)
        set_out(batches)
        job = Job.prepare(model, batches.sample(), options, place)
        if options.refine == "distill":
            check_examples(job.original, job.sites, batches)
        return batches, job
    check_images(images)
    detector = copied(model).eval().to(place)
    seen = Detections(detector, images, place)
    batches = take(seen, rank=rank, world=world)
    real = seen.real(options.layers)
    seen_as_tensors(detector)
    return batches, Job.prepare(detector, batches.sample(), options, place, real)


@contextmanager
def _entered(model: nn.Module, options: Options, device: torch.device | str | None) -> Iterator[torch.device]:
    """At the door: the model checked, the device found; random states are put back at the end."""
    check_model(model)
    place = device_of(model) if device is None else parse_device(device)
    # A caller in inference mode still gets a network that can be trained.
    with untouched_rng(options.seed), quiet_collector(), heap_at_hand(), torch.inference_mode(False):
        yield place
