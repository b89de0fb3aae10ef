"""The commands of the hub over the network, one module each; `hub.cli` puts them beside the others."""
