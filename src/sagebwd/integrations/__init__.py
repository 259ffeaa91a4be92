"""Where people train: adapters to other libraries, imported by name, never by `import sagebwd`."""
