"""Benchmarks: plain functions that return rows; ``sdk bench`` prints them."""
