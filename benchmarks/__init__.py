"""Measurements, and the programs that make those that are not of the package alone."""
