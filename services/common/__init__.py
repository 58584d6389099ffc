"""What every process needs: settings, logs, registry, messages, events, lifecycle, HTTP. Never torch or kvtransfer."""
