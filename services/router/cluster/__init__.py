"""The instances as this router sees them: connections, state, load, adapters and draining."""
