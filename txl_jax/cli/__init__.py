"""Shared code of the programs: from flags to jobs."""
