"""From a network to a checked file, with as many free axes as the network allows."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from leanconv.errors import LeanconvError, warn, whole
from leanconv.network.torchvision_detectors import kind_of
from leanconv.network.user_model import check_model, copied, parse_device
from leanconv.runtimes.export.formats import Written, choose_exporter
from leanconv.runtimes.export.trial import Failed, compare, error_text, failing, tensors, trial_inputs
from leanconv.runtimes.libraries import load
from leanconv.system.atomic_files import cannot_write, check_absent, flush, part_beside

T = TypeVar("T")
# Names of the axes behind batch and channels, by how many an input has.
SIZES = {3: ("length",), 4: ("height", "width"), 5: ("depth", "height", "width")}


def export(
    model: nn.Module,
    example: Tensor,
    path: str | Path,
    format: str | None = None,
    *,
    device: torch.device | str | None = None,
    opset: int | None = None,
    dynamic: bool = True,
    check: bool = True,
) -> Written:
    """Write ``model`` to one new file that runs without leanconv, and compare its answers with the network's in torch.

    Args:
        model: any network but a detector, whose number of boxes depends on the picture. It is not modified.
        example: a batch of images of the usual size.
        path: the new file. It appears once it is checked, or not at all.
        format: ``"onnx"``, ``"pt2"`` (``torch.export.load(path).module()`` runs it) or ``"aot"`` (compiled for one kind
            of machine, run by ``torch._inductor.aoti_load_package``; it takes contiguous images and does not check
            that they are). Default: the first of these whose files end like ``path``.
        device: what a pt2 or aot file is for. Default: where the network is.
        opset: of an ONNX file, 17 or later. Default: 18.
        dynamic: whether the batch and, where format and network allow, height and width are free axes. Without it all
            are those of ``example``.
        check: without it the file is not run, and only the batch is free: that a size is free shows in the check.

    An ONNX file computes in float32, whatever the network does: not every runtime has half-precision convolutions on
    every machine. Its input is called ``images``, a single output ``output``. The other formats keep the dtype.

    Examples:
        >>> import leanconv, tempfile, torch
        >>> network = leanconv.models.character_cnn().eval()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = leanconv.export(network, torch.rand(1, 1, 32, 32), f"{folder}/network.pt2")
        >>> file.format, file.input
        ('pt2', ('batch', 1, 'height', 'width'))
    """
    exporter, path = choose_exporter(path, format, device=device, opset=opset), Path(path)
    for library in exporter.libraries:
        load(library, exporter.extra)
    options = {}
    if exporter.opset is not None:
        options["opset"] = whole("opset", exporter.opset if opset is None else opset, 17)
    target = None if device is None else parse_device(device)
    with new_file(path) as file:
        network, example = exporter.module.prepare(model, example, target, check)

        def attempt(free: dict[int, str]) -> Written:
            inputs = trial_inputs(network, example, free) if check else []
            answers = exporter.module.write(network, example, free, file, inputs, **options)
            return Written(
                path=path,
                format=exporter.name,
                input=tuple(free.get(axis, size) for axis, size in enumerate(example.shape)),
                dtype=str(example.dtype).removeprefix("torch."),
                checked=tuple(tuple(x.shape) for x in inputs),
                difference=compare(network, answers, inputs) if check else None,
                **options,
            )

        return freest(example, exporter.title, attempt, batch=dynamic, sizes=check and exporter.free_sizes)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A path to write to, in a folder whose files are moved beside ``path`` at the end; after an error none is left."""
    try:
        with part_beside(path) as part:
            yield part / path.name
            _move(part, path)
    except OSError as error:
        raise cannot_write(path, error) from error


def _move(part: Path, path: Path) -> None:
    # The file itself last: whoever waits for it finds the files it refers to.
    files = sorted(part.iterdir(), key=lambda file: file.name == path.name)
    for file in files:
        check_absent(path.with_name(file.name))
    flush(part)
    for file in files:
        os.rename(file, path.with_name(file.name))


def prepared(
    model: nn.Module, example: Tensor, *, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> tuple[nn.Module, Tensor]:
    """A copy of ``model`` to be traced, in eval mode, and ``example`` on its device and in its dtype."""
    check_model(model)
    if kind_of(model) is not None:
        raise LeanconvError(
            f"{type(model).__name__} is a detector, whose number of boxes depends on the picture, which torch.export "
            "does not take; export its backbone (model.backbone) instead."
        )
    if not isinstance(example, Tensor) or example.dim() < 2 or not example.numel():
        given = f"shape {tuple(example.shape)}" if isinstance(example, Tensor) else type(example).__name__
        raise LeanconvError(f"example is of {given}; give a batch of images as one tensor, such as 1 x 3 x 224 x 224.")
    network = copied(model).eval().requires_grad_(False).to(device=device, dtype=dtype)
    first = next((p for p in network.parameters() if p.is_floating_point()), None)
    example = example.detach()
    if first is not None:
        example = example.to(first.device, first.dtype if example.is_floating_point() else None)
    try:
        with torch.no_grad():
            answers = tensors(network(example))
    except Exception as error:
        shape = " x ".join(map(str, example.shape))
        raise LeanconvError(
            f"the network fails on an input of {shape} ({error_text(error)}); give an example of the size and channels "
            "it takes."
        ) from error
    if not any(bool(answer.any()) for answer in answers):
        warn("the network answers 0 whatever it is given, so the check says nothing; are its weights the trained ones?")
    return network, example


def freest(
    example: Tensor, title: str, attempt: Callable[[dict[int, str]], T], *, batch: bool = True, sizes: bool = True
) -> T:
    """The first of these that works: batch and sizes free, batch free, all fixed. Without ``batch`` or ``sizes`` those
    are not tried. One warning says what had to be fixed."""
    names = SIZES.get(example.dim(), ()) if batch and sizes and example.is_floating_point() else ()
    only = {0: "batch"}
    forms = ([only | dict(enumerate(names, 2))] if names else []) + ([only] if batch else []) + [{}]
    size = " x ".join(map(str, example.shape[2:]))
    fixed = {1: f"the image size ({size})", 0: f"the batch ({len(example)}) and the image size ({size})"}
    reason = None
    for free in forms:
        try:
            written = attempt(free)
        except Failed as error:
            reason = reason or error
            if not free:
                raise LeanconvError(f"{title} cannot be written: {error}; nothing was left behind.") from error
            continue
        if reason is not None:
            warn(f"{title} fixes {fixed[len(free)]}: {reason}.")
        return written
    raise AssertionError("the last try is the fixed one")


def traced(model: nn.Module, example: Tensor, free: dict[int, str]) -> torch.export.ExportedProgram:
    """torch.export's program with the axes of ``free`` open."""
    if free:  # a batch of one would be taken for fixed
        example = example[[0, min(1, len(example) - 1)]]
    shapes: Any = (dict.fromkeys(free, torch.export.Dim.DYNAMIC),) if free else None
    axes = f"a free {', '.join(free.values())}" if free else "all axes fixed"
    with failing(f"torch.export does not take it with {axes}"), quiet(), plain_attention():
        program = torch.export.export(model, (example,), dynamic_shapes=shapes)
    _drop_stand_ins(program)
    return program


def _drop_stand_ins(program: torch.export.ExportedProgram) -> None:
    """Remove the NaN weights of replaced layers, which a network may have asked for their dtype: torch before 2.9
    cannot write NaN to a file. Nothing else is removed: to torch, blocks that only work in place are dead code."""
    for module in program.graph_module.modules():  # what runs under torch.no_grad() is a graph in the graph
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in reversed(module.graph.nodes):
            if node.target in (torch.ops.aten.full.default, torch.ops.aten.expand.default) and not node.users:
                module.graph.erase_node(node)
        module.recompile()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide what exporters print for their own developers; real problems are raised as errors."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def plain_attention() -> Iterator[None]:
    """Attention in ordinary operations: no other runtime has torch's fast path of eval mode."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
