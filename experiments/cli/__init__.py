"""From flags to jobs: what the programs share."""
