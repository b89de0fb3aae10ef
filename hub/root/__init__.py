"""The files on disk under a hub root: the shards, their readers' positions, and the rules of what is kept."""
