"""One run, with its directory, its record and the tasks on it.

The tasks are training, scoring, generation and conversion.
"""
