"""The plugin's ops. One without a builder here falls back to the SDK's reference implementation."""
