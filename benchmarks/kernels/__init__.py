"""leanconv's GPU kernels: right, and how fast."""
