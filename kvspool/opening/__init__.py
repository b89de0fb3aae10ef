"""Create and open logs: what was asked for, and what is there."""
