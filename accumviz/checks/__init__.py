"""What goes wrong in training loops, found in their ledgers: rules, one function each, and the report."""
