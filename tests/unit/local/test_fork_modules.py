"""The fork server of `baton serve` imports the modules of a model before it forks the instances."""

import json
import shutil
from pathlib import Path

from baton_serve.services.local.main import modules_to_fork
from baton_serve.services.local.settings import DEMO_MODEL


def test_nothing_is_imported_for_models_that_the_engine_loads_itself(tmp_path: Path) -> None:
    assert modules_to_fork(str(DEMO_MODEL)) == []
    # As `baton serve file.gguf` unpacks it.
    shutil.copy(DEMO_MODEL / "config.json", tmp_path)
    assert modules_to_fork(str(tmp_path / "file.gguf")) == []


def test_transformers_is_imported_for_other_models(tmp_path: Path) -> None:
    assert modules_to_fork(str(tmp_path)) == ["baton_serve.engine.loading.transformers_loader"]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt-neox"}))
    assert modules_to_fork(str(tmp_path))[1:] == ["transformers.models.gpt_neox.modeling_gpt_neox"]
