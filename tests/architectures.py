"""Real architectures, small: what any network means."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayesify import ABNN, BayesAdapter, Classification, Likelihood, Method


@dataclass(frozen=True)
class Architecture:
    """A network, what it takes, and the methods whose draws cannot be vectorised over it."""

    name: str
    build: Callable[[], nn.Module]
    example: Callable[[], Any]
    looped: tuple[type[Method], ...] = ()
    likelihood: str | Likelihood = "classification"

    def __str__(self) -> str:
        return self.name


def _image(size: int = 32, channels: int = 3) -> Callable[[], Tensor]:
    return lambda: torch.randn(2, channels, size, size)


def _timm(name: str, size: int = 32, **settings: Any) -> Architecture:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=5, **settings)

    return Architecture(f"timm-{name}", build, _image(size))


def _torchvision(name: str, example: Callable[[], Any], **settings: Any) -> Architecture:
    def build() -> nn.Module:
        from torchvision import models

        source = models
        for part in name.split(".")[:-1]:
            source = getattr(source, part)
        return getattr(source, name.rsplit(".", maxsplit=1)[-1])(
            weights=None, num_classes=5, **settings
        )

    return Architecture(f"torchvision-{name}", build, example)


def _tokens(mask: bool = True) -> Callable[[], dict[str, Tensor]]:
    def example() -> dict[str, Tensor]:
        batch = {"input_ids": torch.randint(3, 20, (2, 7))}
        if mask:
            batch["attention_mask"] = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
        return batch

    return example


_SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "num_labels": 5,
    "pad_token_id": 0,
}


def _transformers(kind: str, **settings: Any) -> Architecture:
    def build() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**settings)
        return getattr(transformers, f"{kind}ForSequenceClassification")(config)

    return Architecture(f"transformers-{kind}", build, _tokens())


def _causal_lm() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=32, n_layer=2, n_head=2))


def _hf_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    settings = {**_SMALL, "image_size": 32, "patch_size": 8}
    del settings["vocab_size"], settings["pad_token_id"]
    return ViTForImageClassification(ViTConfig(**settings))


def _torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        image_size=32,
        patch_size=8,
        num_layers=3,
        num_heads=4,
        hidden_dim=64,
        mlp_dim=128,
        num_classes=5,
    )


class Recurrent(nn.Module):
    """An LSTM between layers: torch has no vmap rule for it, where anything before it varies."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(6)
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.after = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.after(self.lstm(self.before(x))[0][:, -1]))


class Encoder(nn.Module):
    """torch's own transformer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


class Shared(nn.Module):
    """One layer registered twice, and one scale that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.again = self.norm
        self.other = nn.LayerNorm(8)
        self.other.weight = self.norm.weight
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x)).relu()
        return self.head(self.other(self.again(h + 1).sin()))


class ZeroCentred(nn.Module):
    """A norm that stores gamma - 1, as Gemma's."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x / x.square().mean(-1, keepdim=True).add(1e-6).sqrt() * (1 + self.weight)


class ZeroCentredRMSNorm(ZeroCentred):
    pass


class Returns(nn.Module):
    """Returns what networks return: a dict, a tuple, an object."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.body = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5))

    def forward(self, x: Tensor) -> Any:
        logits = self.body(x)
        if self.how == "dict":
            return {"logits": logits, "hidden": x, "note": "text"}
        return (logits, x)


def _vector() -> Tensor:
    return torch.randn(2, 6)


_TORCH = [
    Architecture(
        "torch-batchnorm1d",
        lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5)),
        _vector,
    ),
    Architecture(
        "torch-syncbatchnorm",
        lambda: nn.Sequential(nn.Linear(6, 8), nn.SyncBatchNorm(8), nn.Tanh(), nn.Linear(8, 5)),
        _vector,
    ),
    Architecture(
        "torch-groupnorm-1d",
        lambda: nn.Sequential(
            nn.Conv1d(3, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(64, 5)
        ),
        lambda: torch.randn(2, 3, 10),
    ),
    Architecture(
        "torch-instancenorm",
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True), nn.Flatten(), nn.Linear(288, 5)
        ),
        _image(8),
    ),
    Architecture(
        "torch-batchnorm3d",
        lambda: nn.Sequential(
            nn.Conv3d(1, 4, 3), nn.BatchNorm3d(4), nn.Flatten(), nn.Linear(32, 5)
        ),
        lambda: torch.randn(2, 1, 4, 4, 4),
    ),
    Architecture(
        "torch-rmsnorm",
        lambda: nn.Sequential(nn.Linear(6, 8), nn.RMSNorm(8), nn.Linear(8, 5)),
        _vector,
    ),
    Architecture(
        "torch-zero-centred",
        lambda: nn.Sequential(nn.Linear(6, 8), ZeroCentredRMSNorm(8), nn.Linear(8, 5)),
        _vector,
    ),
    Architecture("torch-shared", Shared, _vector),
    Architecture("torch-transformer", Encoder, lambda: torch.randn(2, 4, 16)),
    Architecture("torch-lstm", Recurrent, lambda: torch.randn(2, 4, 6), (ABNN, BayesAdapter)),
    Architecture("torch-dict", lambda: Returns("dict"), _vector),
    Architecture("torch-tuple", lambda: Returns("tuple"), _vector),
]

ARCHITECTURES = [
    *_TORCH,
    _timm("resnet18"),
    _timm("resnet26d"),
    _timm("resnetv2_50", norm_layer="groupnorm", size=64),
    _timm("efficientnet_b0"),
    _timm("mobilenetv3_small_100"),
    _timm("regnetx_002"),
    _timm("ghostnet_100"),
    _timm("repvgg_a0"),
    _timm("convnext_atto"),
    _timm("convnextv2_atto"),
    _timm("poolformer_s12"),
    _timm("edgenext_xx_small", size=64),
    _timm("vit_tiny_patch16_224", img_size=32),
    _timm("deit_tiny_patch16_224", img_size=32),
    _timm("cait_xxs24_224", img_size=32),
    _timm("swin_tiny_patch4_window7_224", size=56, img_size=56),
    _torchvision("resnet18", _image()),
    _torchvision("regnet_y_400mf", _image()),
    _torchvision("densenet121", _image()),
    _torchvision("shufflenet_v2_x0_5", _image()),
    _torchvision("mnasnet0_5", _image()),
    Architecture("torchvision-vision_transformer", _torchvision_vit, _image()),
    _torchvision("segmentation.lraspp_mobilenet_v3_large", _image(64), weights_backbone=None),
    _torchvision("segmentation.fcn_resnet50", _image(32), weights_backbone=None),
    _torchvision("video.r3d_18", lambda: torch.randn(1, 3, 4, 32, 32)),
    _transformers("Bert", **_SMALL),
    _transformers("DistilBert", dim=32, n_layers=2, n_heads=2, hidden_dim=48, num_labels=5),
    _transformers("Roberta", **_SMALL),
    _transformers("Llama", **_SMALL),
    _transformers("Qwen3", num_key_value_heads=1, head_dim=16, **_SMALL),
    _transformers("Gemma", num_key_value_heads=1, head_dim=16, **_SMALL),
    _transformers("ModernBert", **_SMALL),
    Architecture("transformers-ViT", _hf_vit, lambda: {"pixel_values": torch.randn(2, 3, 32, 32)}),
    Architecture(
        "transformers-GPT2LM",
        _causal_lm,
        _tokens(mask=False),
        likelihood=Classification(output=lambda out: out.logits.transpose(1, 2)),
    ),
]
