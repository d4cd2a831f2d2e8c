"""Commands for benchmarks and estimates."""
