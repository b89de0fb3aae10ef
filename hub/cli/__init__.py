"""The commands `kvspool hub`, `ship` and `pipeline`, one module each."""

EXTRA = "hub"
