"""One run: its folder and record, and the jobs on it: training, scoring, generation, conversion."""
