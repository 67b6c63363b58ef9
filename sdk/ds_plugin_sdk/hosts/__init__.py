"""Programs that the SDK's accelerators serve. Each host has a folder; nothing outside of it knows the host's insides."""
