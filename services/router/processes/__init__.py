"""Several processes behind one port (`--workers`): each is a whole router, as N replicas are; one more keeps them."""
