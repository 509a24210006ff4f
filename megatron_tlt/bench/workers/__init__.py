"""What the benchmarks' own launches run."""
