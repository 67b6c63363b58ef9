"""Programs that the SDK's accelerators serve, a folder each; nothing outside of a folder knows its host's insides."""
