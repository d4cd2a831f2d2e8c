"""Benchmarks and estimates: throughput, roofline, memory on TPU slices."""
