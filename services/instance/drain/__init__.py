"""How an instance stops: it drains, hands its most used blocks to another instance, and shuts down."""
