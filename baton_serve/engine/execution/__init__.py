"""Runs scheduled batches on the device, eagerly or as captured graphs."""
