"""Exchange of cached blocks between instances, outside a handoff."""
