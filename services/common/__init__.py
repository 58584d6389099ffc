"""Code that every process uses: settings, logs, registry, RPC, block events, lifecycle, HTTP.

It never imports torch or kvtransfer, so that the router starts quickly.
"""
