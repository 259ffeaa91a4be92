"""Adapters to other libraries. Each is imported by its name; `import sagebwd` imports only `sdpa`."""
