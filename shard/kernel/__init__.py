"""The loops over keys and over many logs, compiled and interpreted."""
