"""The commands of the hub over the network, one module each; `hub.cli` adds them to the others."""
