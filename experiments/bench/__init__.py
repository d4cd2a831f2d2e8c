"""Programs of the benchmarks and estimates."""
