"""An AOTInductor package: the network compiled ahead of time for this kind of machine."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from leanconv.errors import LeanconvError
from leanconv.network.user_model import parse_device
from leanconv.runtimes.export.file_name import new_file
from leanconv.runtimes.export.program import Written, freest, prepared, quiet, shape_of, traced
from leanconv.runtimes.export.trial import Failed, compare, inputs, said, tensors


def to_aot(model: nn.Module, example: Tensor, path: str | Path, device: torch.device | str = "cpu") -> Path:
    """Compile ``model`` for ``device`` into a new file ``path`` (.pt2) for ``torch._inductor.aoti_load_package``.

    ``example``: a batch of images of the size to compile for; the batch is free, the size is not. The package takes
    contiguous images and, like all of AOTInductor's, does not check that they are.
    """
    return write_aot(model, example, Path(path), device).path


def write_aot(model: nn.Module, example: Tensor, path: Path, device: torch.device | str = "cpu") -> Written:
    """``to_aot``, with what is known about the file."""
    place = parse_device(device)
    _check_compiler()
    with new_file(path, "aot") as part:
        network, example = prepared(model, example.contiguous(), device=place)

        def attempt(free: dict[int, str]) -> Written:
            program = traced(network, example, free)
            try:
                with quiet():
                    torch._inductor.aoti_compile_and_package(program, package_path=str(part))
                    compiled = torch._inductor.aoti_load_package(str(part))
            except OSError:
                raise
            except Exception as error:
                raise Failed(f"AOTInductor does not compile it ({said(error)})") from error
            tried = inputs(network, example, free)
            return Written(
                path=path,
                format="aot",
                input=shape_of(example, free),
                dtype=str(example.dtype).removeprefix("torch."),
                checked=tuple(tuple(x.shape) for x in tried),
                difference=compare(network, lambda x: tensors(compiled(x)), tried),
            )

        return freest(example, "the AOTInductor package", attempt, sizes=False)


def _check_compiler() -> None:
    from torch._inductor import cpp_builder

    try:
        with quiet():
            cpp_builder.get_cpp_compiler()
    except Exception:
        raise LeanconvError(
            "an AOTInductor package needs a C++ compiler, and there is none here; install g++ or clang++ (or set CXX), "
            "or use the format pt2."
        ) from None
