"""Hosts out of namespaces of this machine, and a network between them that fails on request. See `tools/cluster --help`."""

from hosts.cluster import Cluster, Host, Link, NoNamespaces, running

__all__ = ["Cluster", "Host", "Link", "NoNamespaces", "running"]
