"""Model folders and weight files: from disk to a loaded model."""
