"""A network as a file that runs without leanconv: ONNX, torch.export's ``.pt2``, an AOTInductor package."""

from __future__ import annotations

from leanconv.export.aot import to_aot
from leanconv.export.onnx import to_onnx
from leanconv.export.pt2 import to_pt2

__all__ = ["to_aot", "to_onnx", "to_pt2"]
