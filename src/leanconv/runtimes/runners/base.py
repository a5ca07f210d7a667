"""What every runtime has. Importing this imports neither torch nor a library: the command's help reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from leanconv.errors import LeanconvError

if TYPE_CHECKING:
    import torch
    from torch import nn

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """How a network is to run. ``channels_last`` is for torch only; other runtimes choose a layout themselves."""

    device: torch.device
    threads: int = 1
    dtype: str = "float32"
    channels_last: bool = False


class Runner(Protocol):
    """A runtime."""

    name: ClassVar[str]
    libraries: ClassVar[tuple[str, ...]] = ()  # modules beside torch; their versions are recorded with every time
    extra: ClassVar[str | None] = None  # pip install 'leanconv[EXTRA]' installs them
    timeable: ClassVar[bool] = False  # whether ranks="latency" may choose ranks by its times
    device: ClassVar[str | None] = None  # where it runs by default; None: where the model is

    def refuse(self, model: nn.Module, conditions: Conditions) -> None:
        """Say in one sentence why it cannot run ``model`` here, before any time is spent."""
        return

    def prepare(self, model: nn.Module, example: Any, conditions: Conditions) -> Callable[[], Any]:
        """A call of ``model``, in eval mode, on ``example``, a float32 batch on the CPU (for a detector a list)."""

    def shows_memory(self, device: torch.device) -> bool:
        """Whether torch can measure the peak memory of its calls."""
        return False

    def clear(self) -> None:
        """Free what was kept for the calls that were prepared."""
        return

    def details(self) -> str:
        """What ``leanconv doctor`` adds, such as the devices its library finds."""
        return ""


def refuse_detector(runtime: str, model: nn.Module) -> None:
    from leanconv.network.torchvision_detectors import kind_of

    if kind_of(model) is not None:
        raise LeanconvError(
            f"{runtime} does not run detectors here, whose shapes depend on what they find; use torch or torch-compile."
        )
