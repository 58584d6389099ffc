"""Load generator, micro benchmarks and measurements of other servers. The product never imports this package."""
