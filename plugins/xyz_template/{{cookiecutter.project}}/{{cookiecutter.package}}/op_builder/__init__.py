"""The plugin's ops: each module here defines builders. An op without one runs by the SDK's reference."""
