"""Official clients against a router over a fake cluster. Here, for they take seconds to import."""

from tests.unit.router.conftest import model, model_folder, serve

__all__ = ["model", "model_folder", "serve"]
