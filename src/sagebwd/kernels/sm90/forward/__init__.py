"""The forward, in CuTe DSL."""
