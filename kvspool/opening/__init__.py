"""Create, open, delete and rename logs: what was asked for, and what is there."""
