"""`baton drain` and `baton rotate`: instances taken out of service and restarted without a failed request."""
