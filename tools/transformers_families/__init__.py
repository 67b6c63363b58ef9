"""Models of transformers, tiny and with random weights, plain against accelerated: ``make transformers-families``."""
