"""How an instance notices a step that does not end, and what its process does then."""
