"""A network as a file that runs without leanconv: ONNX, torch.export's ``.pt2``, an AOTInductor package."""
