"""Settings of a process, from flags, variables, a file and defaults."""
