"""Loads model folders and weight files into models."""
