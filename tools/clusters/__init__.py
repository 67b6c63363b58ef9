"""Real launchers on two nodes that are namespaces of this machine: see `clusters.__main__`."""
