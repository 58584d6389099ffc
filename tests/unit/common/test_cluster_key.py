from pathlib import Path

import pytest

from baton_serve.services.common.cluster_key import cluster_key, read_cluster_key
from baton_serve.services.common.errors import ConfigurationError


def test_equal_texts_give_equal_keys_and_others_do_not() -> None:
    assert cluster_key("a" * 32) == cluster_key("a" * 32)
    assert cluster_key("a" * 32).public != cluster_key("b" * 32).public
    assert len(cluster_key("a" * 32).public) == len(cluster_key("a" * 32).secret) == 40


def test_an_operator_proves_the_key_without_sending_it() -> None:
    key = cluster_key("a" * 32)
    assert key.is_admin(f"Bearer {key.admin_token}")
    assert not key.is_admin(f"Bearer {'a' * 32}") and not key.is_admin("") and not key.is_admin("Bearer é")
    assert "a" * 32 not in repr(key) and key.admin_token not in repr(key)


def test_a_file_that_cannot_be_a_key_is_refused(tmp_path: Path) -> None:
    assert read_cluster_key(None) is None
    (tmp_path / "key").write_text("a" * 40 + "\n")
    assert read_cluster_key(str(tmp_path / "key")) == cluster_key("a" * 40)
    (tmp_path / "short").write_text("hunter2")
    for name, reason in (("short", "7 characters"), ("none", "No such file")):
        with pytest.raises(ConfigurationError, match=reason):
            read_cluster_key(str(tmp_path / name))
