"""The whole API of a router over a fake cluster, by official clients and field by field. Here, for it takes seconds."""

from tests.unit.router.conftest import model, model_folder, serve

__all__ = ["model", "model_folder", "serve"]
