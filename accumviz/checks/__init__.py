"""Rules that find in ledgers what goes wrong in training loops, one function each, and the report."""
