"""The endpoints that generate text or vectors: one file or folder for each family of the API."""
