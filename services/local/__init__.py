"""`baton serve` starts and supervises a cluster on one machine; `make demo` shows a handoff with the bundled model."""
