"""Launchers for runs on Cloud TPUs, on Slurm, in sweeps and in notebooks."""
