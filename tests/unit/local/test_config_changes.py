"""Changes of config.json: in the form that the config has, part by part."""

from typing import Any

import pytest

from baton_serve.model_hub import HubError
from baton_serve.model_source import change_config

YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("config", "changes", "expected"),
    [
        ({"a": 1, "b": 2}, {"b": 3, "c": None}, {"a": 1, "b": 3, "c": None}),
        ({"text_config": {"a": 1, "b": 2}}, {"text_config": {"b": 3}}, {"text_config": {"a": 1, "b": 3}}),
        ({"quantization_config": {"a": 1}}, {"quantization_config": {"b": 2}}, {"quantization_config": {"b": 2}}),
        # The older form, with two fields.
        ({"rope_theta": 1e4}, {"rope_scaling": YARN}, {"rope_theta": 1e4, "rope_scaling": YARN}),
        # The newer form. The base of the frequencies stays.
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
            {"rope_scaling": YARN},
            {"rope_parameters": {"rope_theta": 1e4, **YARN}},
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
            {"rope_theta": 5e5},
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": None},
            {"rope_parameters": YARN},
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e4, **YARN}},
        ),
        # A model that reads images has its rotary settings in its language model.
        (
            {"text_config": {"rope_theta": 1e4}},
            {"rope_theta": 5e5},
            {"text_config": {"rope_theta": 5e5}},
        ),
    ],
)
def test_a_change_keeps_the_form_of_the_config(
    config: dict[str, Any], changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert change_config(config, changes) == expected


def test_rules_of_each_layer_type_are_changed_together_or_not_at_all() -> None:
    config = {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}}
    with pytest.raises(HubError, match="give them all as rope_parameters"):
        change_config(config, {"rope_scaling": YARN})
    both = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}
    assert change_config(config, {"rope_parameters": both}) == {"rope_parameters": both}
