"""Exchange of cached blocks between instances, outside of handoffs."""
