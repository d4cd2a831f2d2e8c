"""A run: its directory, its record, and its tasks.

The tasks are training, scoring, generation and conversion.
"""
