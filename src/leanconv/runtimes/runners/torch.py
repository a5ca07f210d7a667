"""torch, in four ways."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from leanconv.errors import LeanconvError, listing
from leanconv.runtimes.runners.base import Conditions, Runner, refuse_detector

if TYPE_CHECKING:
    import torch
    from torch import nn


class Torch(Runner):
    """torch as it is, operation by operation."""

    name = "torch"
    timeable = True

    def prepare(self, model: nn.Module, example: Any, conditions: Conditions) -> Callable[[], Any]:
        return call_of(self.network(model, conditions), placed_input(example, conditions))

    def network(self, model: nn.Module, conditions: Conditions) -> Any:
        """What is called: a copy of ``model``."""
        return placed_model(model, conditions)

    def shows_memory(self, device: torch.device) -> bool:
        return True


class TorchCompile(Torch):
    """torch.compile: on a GPU with every kernel tuned (max-autotune), on a CPU with its default mode."""

    name = "torch-compile"
    timeable = False

    def refuse(self, model: nn.Module, conditions: Conditions) -> None:
        on_gpu = conditions.device.type == "cuda"
        if on_gpu and not _has_triton():
            raise LeanconvError("torch-compile on a GPU needs Triton, which is not installed; pip install triton.")
        if not on_gpu and _compiler() is None:
            raise LeanconvError("torch-compile on a CPU needs a C++ compiler; install g++ or clang++.")

    def network(self, model: nn.Module, conditions: Conditions) -> Any:
        import torch

        mode = "max-autotune" if conditions.device.type == "cuda" else "default"
        return torch.compile(super().network(model, conditions), mode=mode, dynamic=False)

    def prepare(self, model: nn.Module, example: Any, conditions: Conditions) -> Callable[[], Any]:
        call = super().prepare(model, example, conditions)
        try:
            call()
        except LeanconvError as error:
            # Compiling fails in a dozen classes of its own; the network itself has run before.
            raise LeanconvError(f"torch-compile could not compile the network: {error}") from error
        return call

    def shows_memory(self, device: torch.device) -> bool:
        return device.type == "cuda"  # compiled code on a CPU hides its tensors

    def clear(self) -> None:
        import torch

        # Compiled code is kept with the forward it was made from; after eight of one forward torch compiles no more.
        torch.compiler.reset()

    def details(self) -> str:
        return listing(filter(None, [_compiler(), "Triton" if _has_triton() else None]))


class TorchCudaGraph(Torch):
    """The launches of one run recorded on the GPU and replayed at once."""

    name = "torch-cudagraph"
    timeable = False

    def refuse(self, model: nn.Module, conditions: Conditions) -> None:
        if conditions.device.type != "cuda":
            raise LeanconvError(
                f"torch-cudagraph runs on a GPU only, and the device is {conditions.device}; give --device cuda where "
                "there is one."
            )
        refuse_detector(self.name, model)

    def prepare(self, model: nn.Module, example: Any, conditions: Conditions) -> Callable[[], Any]:
        import torch

        call = super().prepare(model, example, conditions)
        # Libraries set themselves up on their first runs, which must not be recorded.
        with torch.cuda.device(conditions.device):
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(3):
                    call()
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                answer = call()

        def replay(kept: Any = call) -> Any:  # a graph reads the weights of the network, and does not keep it alive
            graph.replay()
            return answer

        return replay

    def shows_memory(self, device: torch.device) -> bool:
        return False


class TorchKernels(Torch):
    """torch with leanconv's fused kernels where a layer is factorised, in channels-last layout."""

    name = "torch-kernels"
    extra = "kernels"
    timeable = False

    def refuse(self, model: nn.Module, conditions: Conditions) -> None:
        from leanconv.kernels.availability import missing

        if (why := missing(conditions.device)) is not None:
            raise LeanconvError(f"torch-kernels cannot run here: {why}")
        refuse_detector(self.name, model)

    def prepare(self, model: nn.Module, example: Any, conditions: Conditions) -> Callable[[], Any]:
        return super().prepare(model, example, replace(conditions, channels_last=True))

    def network(self, model: nn.Module, conditions: Conditions) -> Any:
        from leanconv.kernels.optimize import apply

        network = super().network(model, conditions).requires_grad_(False)
        apply(network, "auto")
        return network

    def shows_memory(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def details(self) -> str:
        from leanconv.kernels.tune import cache_file

        return f"measured choices are kept in {cache_file()}"


def placed_model(model: nn.Module, conditions: Conditions) -> nn.Module:
    """A copy of ``model`` in eval mode, on the device, in the dtype and layout of ``conditions``."""
    import torch

    from leanconv.network.user_model import copied

    network = copied(model).eval().to(conditions.device, getattr(torch, conditions.dtype))
    # Five-dimensional filters have a channels-last layout of their own, which ``channels_last`` does not mean.
    last = conditions.channels_last and all(tensor.dim() != 5 for tensor in network.parameters())
    return network.to(memory_format=torch.channels_last) if last else network


def placed_input(example: Any, conditions: Conditions) -> Any:
    """``example``, a tensor or a detector's list of them, likewise."""
    import torch
    from torch.utils._pytree import tree_map_only

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.to(conditions.device, getattr(torch, conditions.dtype))
        last = conditions.channels_last and moved.dim() == 4
        return moved.contiguous(memory_format=torch.channels_last) if last else moved

    return tree_map_only(torch.Tensor, move, example)


def call_of(network: Any, example: Any) -> Callable[[], Any]:
    import torch

    from leanconv.network.user_model import model_failed

    def call() -> Any:
        with torch.inference_mode():
            try:
                return network(example)
            except Exception as error:
                raise model_failed(error, example) from error

    return call


def _compiler() -> str | None:
    """The path of a C++ compiler."""
    names = (os.environ.get("CXX"), "g++", "clang++", "cl")
    return next(filter(None, (shutil.which(name) for name in names if name)), None)


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
