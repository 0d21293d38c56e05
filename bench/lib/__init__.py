"""What the benchmarks share: cases, timing, tables."""
