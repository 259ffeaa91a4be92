"""Where the error comes from: Table 1 and its like."""
