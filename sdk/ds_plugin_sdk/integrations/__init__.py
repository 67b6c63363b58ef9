"""Other people's models on the SDK's ops, without a change to the models."""
