"""How an instance stops: draining, handing over its most used blocks, and shutting down."""
