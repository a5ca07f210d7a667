"""A network as a file that runs without leanconv: ONNX, torch.export's ``.pt2``, an AOTInductor package."""

from __future__ import annotations

from leanconv.runtimes.export.aot import to_aot
from leanconv.runtimes.export.onnx import to_onnx
from leanconv.runtimes.export.pt2 import to_pt2

__all__ = ["to_aot", "to_onnx", "to_pt2"]
