"""PaliGemma in the router: the hashes of prompts whose tokens all see each other, and what their texts become."""

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.media import MediaSpan
from baton_serve.contracts.vision import default_template, image_family
from baton_serve.contracts.vision.model_files import ModelFacts
from baton_serve.services.router.requests.prompt_request import PromptBlockHashes
from baton_serve.services.router.text.chat_template import ChatTemplates


def test_a_prompt_that_sees_itself_shares_blocks_with_equal_ones_only() -> None:
    layout = KVLayout(fingerprint="x", num_layers=1, num_kv_heads=1, block_tokens=4, head_dim=4, dtype="float32")
    both_ways = replace(layout, has_bidirectional_prompts=True)
    assert replace(layout, has_bidirectional_prompts=False) == layout
    tokens, media = [*range(12)], [MediaSpan(0, 3, b"a" * 32)]
    known = PromptBlockHashes(tokens, "salt", "", media)
    equal = PromptBlockHashes(list(tokens), "salt", "", list(media))
    assert known.hashes(both_ways) == equal.hashes(both_ways)
    assert known.tenant_root(both_ways) == known.root(layout) != known.root(both_ways)
    others = [
        PromptBlockHashes([*tokens, 12], "salt", "", media),
        PromptBlockHashes(tokens, "salt", "", [MediaSpan(0, 3, b"b" * 32)]),
        PromptBlockHashes(tokens, "other", "", media),
    ]
    for other in others:
        assert not {*known.hashes(both_ways)} & {*other.hashes(both_ways)}
    assert known.hashes(layout)[:3] == others[0].hashes(layout)[:3]
    # Generated tokens follow the blocks of their prompt, also in a beam search, whose steps count them as prompt.
    longer = [*tokens, 20, 21, 22, 23]
    beam = PromptBlockHashes(longer, "salt", "", media, len(tokens))
    for answered in (known.extended(longer), known.extended(tokens).extended(longer), beam, beam.extended(longer)):
        assert answered.root(both_ways) == known.root(both_ways)
        assert answered.hashes(both_ways)[:3] == known.hashes(both_ways)


PALIGEMMA = ModelFacts(
    config={"model_type": "paligemma", "image_token_index": 9, "vision_config": {"image_size": 448, "patch_size": 14}},
    images={"image_processor_type": "SiglipImageProcessor"},
    tokenizer={"bos_token": {"content": "<s>"}},
)


def test_a_prompt_of_paligemma_is_written_as_its_processor_does() -> None:
    family = image_family(PALIGEMMA)
    assert family is not None and family.is_fixed and family.attends_both_ways
    assert family.parts(width=10, height=900) == (1024,)
    assert family.framed("<image>what<image> is it") == "<image>what<image><s> is it\n"
    stated = replace(PALIGEMMA, images={"image_seq_length": 7})
    found = image_family(stated)
    assert found is not None and found.parts(width=1, height=1) == (7,)


def test_paligemma_has_a_chat_template_unless_its_folder_has_one(tmp_path: Path) -> None:
    default = default_template(PALIGEMMA)
    template = ChatTemplates.from_folder(tmp_path, {"bos_token": "<s>"}, None, default).pick(has_tools=False)
    assert template.content_format == "openai"
    image, text = {"type": "image"}, {"type": "text", "text": "it?"}
    chats: list[tuple[Any, str]] = [
        ([image, text, image], "<image>it?<image>"),
        ([text], "<s>it?\n"),
        ("it?", "<s>it?\n"),
    ]
    for content, written in chats:
        messages: list[Any] = [{"role": "user", "content": content}]
        assert template.render(messages, variables={"bos_token": "<s>"}) == written
    (tmp_path / "chat_template.jinja").write_text("its own")
    assert ChatTemplates.from_folder(tmp_path, {}, None, default).source == "its own"
    assert default_template(ModelFacts(config={"model_type": "llava"}, images={"size": 336})) is None
