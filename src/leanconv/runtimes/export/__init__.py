"""A network as a file that runs without leanconv: ONNX, torch.export's ``.pt2``, an AOTInductor package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from leanconv.runtimes.export.formats import Written, choose_exporter

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


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
    exporter = choose_exporter(path, format, device=device, opset=opset)
    from leanconv.runtimes.export.program import write_file

    return write_file(exporter, model, example, Path(path), device, opset, dynamic, check)
