"""Commands for the tables and figures of the paper."""
