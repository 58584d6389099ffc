"""`baton drain` takes one instance out of service; `baton rotate` restarts all instances, without failed requests."""
