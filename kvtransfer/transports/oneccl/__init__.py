"""Two-rank groups of a collective library, device to device where the memory is a device's."""
