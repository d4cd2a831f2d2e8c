"""One run: its directory and record, and the tasks on it: training, scoring, generation, conversion."""
