"""Benchmarks: one file each, run by ``tlt bench NAME``."""
