"""Starting runs elsewhere than in a terminal: Cloud TPU, Slurm, sweeps, a notebook."""
