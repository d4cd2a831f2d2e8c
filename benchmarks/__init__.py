"""Measurements as CSV files, and the comparison with the authors' release (`parity`)."""
