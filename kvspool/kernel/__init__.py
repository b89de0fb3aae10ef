"""The loops over frames, entries, chunks and events, compiled and interpreted, and what they need of the machine."""
