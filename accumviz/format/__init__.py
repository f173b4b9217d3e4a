"""The file: a container of chunks, what a ledger and a graph look like in it, and what opens either."""
