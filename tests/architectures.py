"""The architectures that are in use, tiny: how to build each, and what to feed it. All are built from
configurations, with random weights; nothing is downloaded."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

VOCABULARY, WORDS, IMAGE = 96, 12, 32
Batch = dict[str, torch.Tensor]
Feed = Callable[[], Batch]

# `make test-all` installs diffusers, timm and their needs there, apart from what everything else imports.
sys.path.append(str(Path(sys.prefix, "architectures")))
with contextlib.suppress(ModuleNotFoundError):
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        # Its operators are built for another torch. Nothing here calls them, but its import wants to find
        # these two.
        for _name in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )


@dataclass(frozen=True)
class Architecture:
    """How to build a model, and a batch of its keyword arguments."""

    build: Callable[[], nn.Module]
    feed: Feed


# -- what goes in --------------------------------------------------------------------------------


def ids(**more: Any) -> Batch:
    return {"input_ids": torch.randint(6, VOCABULARY - 6, (2, WORDS)), **more}


def words() -> Batch:
    """Tokens, with a label for each."""
    batch = ids()
    return {**batch, "labels": batch["input_ids"].clone()}


def pixels(**more: Any) -> Batch:
    return {"pixel_values": torch.randn(2, 3, IMAGE, IMAGE), **more}


def classes() -> Batch:
    return pixels(labels=torch.tensor([0, 1]))


def captions() -> Batch:
    """Tokens of which the first four stand for the image."""
    batch = words()
    batch["input_ids"][:, :4] = VOCABULARY - 1
    return {**pixels(), **batch}


def latents(**more: Any) -> Batch:
    return {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor([3, 500]),
        **more,
    }


# -- how it is built -----------------------------------------------------------------------------

TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**TINY, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ENCODER_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 1,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
SEEING = {**TINY, "image_size": IMAGE, "patch_size": 8}
TWO_TOWERS: dict[str, Any] = {
    "text_config": {**TINY, "projection_dim": 32, "projection_size": 32},
    "vision_config": {**SEEING, "projection_dim": 32},
}


def hf(kind: str, feed: Feed, config: dict[str, Any] = TINY, /, **more: Any) -> Architecture:
    """A model class of transformers, with a configuration of the class that belongs to it."""

    def build() -> nn.Module:
        import transformers

        model = getattr(transformers, kind)
        return model(model.config_class(**{**config, **more}))  # type: ignore[no-any-return]

    return Architecture(build, feed)


def causal(kind: str, config: dict[str, Any] = GROUPED, /, **more: Any) -> Architecture:
    return hf(f"{kind}ForCausalLM", words, config, **{"use_cache": False, **more})


def diffusion(kind: str, feed: Feed, **config: Any) -> Architecture:
    """A model class of diffusers."""

    def build() -> nn.Module:
        import diffusers

        return getattr(diffusers, kind)(**config)  # type: ignore[no-any-return]

    return Architecture(build, feed)


def timm_model(kind: str, image: int, **config: Any) -> Architecture:
    """A registered model of timm."""

    def build() -> nn.Module:
        import timm  # type: ignore[import-not-found]

        return timm.create_model(kind, pretrained=False, num_classes=4, **config)  # type: ignore[no-any-return]

    return Architecture(build, lambda: {"x": torch.randn(2, 3, image, image)})


ARCHITECTURES: dict[str, Architecture] = {
    # transformers: decoders
    "GPT-2": hf("GPT2LMHeadModel", words),
    "OPT": causal("OPT", TINY, ffn_dim=64, word_embed_proj_dim=32),
    "BLOOM": causal("Bloom", TINY),
    "Llama": causal("Llama"),
    "Qwen3-MoE": causal("Qwen3Moe", **EXPERTS),
    "Qwen3-Next": causal(
        "Qwen3Next",
        **EXPERTS,
        num_hidden_layers=4,
        shared_expert_intermediate_size=32,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    ),
    "Gemma3": causal("Gemma3", hidden_activation="gelu_pytorch_tanh", sliding_window=8),
    "DeepSeek-V3": causal(
        "DeepseekV3",
        TINY,
        num_key_value_heads=4,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    "GPT-OSS": causal("GptOss", **EXPERTS, sliding_window=8),
    "Mamba": causal("Mamba", TINY, state_size=4),
    "Jamba": causal(
        "Jamba", **EXPERTS, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4, use_mamba_kernels=False
    ),
    "RWKV": causal("Rwkv", TINY, attention_hidden_size=32, layer_norm_epsilon=1e-2, rescale_every=1),
    # encoders of text
    "BERT": hf("BertForMaskedLM", words),
    "ALBERT": hf("AlbertForMaskedLM", words, embedding_size=16),
    "DeBERTa-v2": hf("DebertaV2ForMaskedLM", words, relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "ModernBERT": hf("ModernBertForMaskedLM", words, local_attention=8, cls_token_id=1, sep_token_id=2),
    "XLNet": hf("XLNetLMHeadModel", words, {k: TINY[k] for k in list(TINY)[:4]}, d_inner=64, d_head=8),
    # encoders and decoders, sound
    "T5": hf("T5ForConditionalGeneration", words, TINY, d_kv=8, d_ff=64, decoder_start_token_id=1),
    "Whisper": hf(
        "WhisperForConditionalGeneration",
        lambda: {"input_features": torch.randn(2, 8, 32), "labels": words()["labels"]},
        ENCODER_DECODER,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
    ),
    "Wav2Vec2": hf(
        "Wav2Vec2ForCTC",
        lambda: {"input_values": torch.randn(2, 800), "labels": words()["labels"][:, :4]},
        conv_dim=(16, 16, 16),
        conv_stride=(5, 2, 2),
        conv_kernel=(10, 3, 3),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        apply_spec_augment=False,
        ctc_loss_reduction="mean",
    ),
    # images
    "ViT": hf("ViTForImageClassification", classes, SEEING),
    "ConvNeXt": hf(
        "ConvNextForImageClassification",
        classes,
        {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 2, 1], "drop_path_rate": 0.1},
    ),
    # images and text
    "CLIP": hf("CLIPModel", lambda: {**pixels(), **ids(return_loss=True)}, TWO_TOWERS, projection_dim=32),
    "BLIP-2": hf(
        "Blip2ForConditionalGeneration",
        captions,
        {
            "vision_config": SEEING,
            "qformer_config": {**TINY, "encoder_hidden_size": 32},
            "text_config": {"model_type": "opt", **TINY, "ffn_dim": 64, "word_embed_proj_dim": 32},
            "num_query_tokens": 4,
            "image_token_index": VOCABULARY - 1,
        },
    ),
    # diffusers
    "UNet2DCondition": diffusion(
        "UNet2DConditionModel",
        lambda: {
            "sample": torch.randn(2, 4, 16, 16),
            "timestep": torch.tensor(7),
            "encoder_hidden_states": torch.randn(2, 6, 16),
        },
        sample_size=16,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
        norm_num_groups=4,
    ),
    "SD3": diffusion(
        "SD3Transformer2DModel",
        lambda: latents(encoder_hidden_states=torch.randn(2, 6, 16), pooled_projections=torch.randn(2, 16)),
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=8,
    ),
    # timm
    "EfficientNet": timm_model("test_efficientnet", 2 * IMAGE, channel_multiplier=0.25),
}
