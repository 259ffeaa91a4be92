"""Where people train: adapters to other libraries, imported by name; `import sagebwd` imports sdpa alone."""
