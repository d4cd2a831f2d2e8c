"""Programs of the tables and figures of the paper."""
