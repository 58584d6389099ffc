"""What every process needs: settings, logs, registry, messages, events, lifecycle, HTTP. Never torch, engine or kvtransfer."""
