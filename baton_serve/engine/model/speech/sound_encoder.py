"""The audio encoder and projector of a model whose chats have audio, by transformers: spectra to embeddings."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn


def encode_sound(module: nn.Module, inputs: Mapping[str, Tensor], count: int) -> Tensor:
    """Return the `count` embeddings [count, hidden] of one audio.

    `module` is a model of transformers without its decoder, and `inputs` are the spectra of `HFSoundReader` on its
    device.
    """
    whole = cast(Any, module)
    if not hasattr(whole, "get_audio_features"):
        return _qwen2_audio(whole, inputs["input_features"], inputs["feature_attention_mask"])[:count]
    output = whole.get_audio_features(**inputs)
    # Without a projector the encoder's output is what the decoder reads.
    found = getattr(output, "pooler_output", None)
    features = cast(Tensor, output.last_hidden_state if found is None else found)
    return features.flatten(0, -2)


def _qwen2_audio(whole: Any, spectra: Tensor, mask: Tensor) -> Tensor:
    """Return the embeddings of one audio, and behind them those of silence, by Qwen2-Audio, for which transformers has
    no function that only encodes.

    `spectra` are [1, bands, spectra of a window], and `mask` [1, spectra] has ones for those of the audio.
    """
    from transformers.masking_utils import create_bidirectional_mask  # newer versions of transformers have it

    seen, _ = whole.audio_tower._get_feat_extract_output_lengths(mask.sum(-1))
    # The first convolution halves the spectra; positions of the silence are not attended to.
    positions = torch.arange((spectra.shape[-1] - 2) // 2 + 1, device=spectra.device)
    shape = spectra.new_zeros((1, len(positions), 1))
    visible = (positions[None] < seen[:, None]).long()
    attention = create_bidirectional_mask(config=whole.audio_tower.config, inputs_embeds=shape, attention_mask=visible)
    hidden = whole.audio_tower(spectra, attention_mask=attention).last_hidden_state
    return cast(Tensor, whole.multi_modal_projector(hidden)[0])
