"""A page of one or several runs: learning curves, results, settings, time, samples."""
