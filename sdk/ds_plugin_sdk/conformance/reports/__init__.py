"""What is written of a run: tables for all, JUnit, one HTML page, and the difference between two runs."""
