"""The workers as this router sees them: connections, state, load, adapters and draining."""
