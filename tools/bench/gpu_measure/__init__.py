"""Measurements on one GPU: ``python -m tools.bench.gpu_measure PART --out DIR`` (docs/gpu.md)."""
