"""The networks of the zoo: all classification builders of torchvision, one small member of every timm family."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

SMALL = 64  # pixels a side: enough for most networks to end in a map of at least 2 x 2


# Twelve families, for what takes long: those that found the most faults.
SLICE = [
    "squeezenet1_1",
    "shufflenet_v2_x0_5",
    "mnasnet0_5",
    "timm:dla46_c",
    "timm:convnext_atto",
    "timm:edgenext_xx_small",
    "timm:efficientvit_b0",
    "timm:ghostnet_050",
    "timm:convit_tiny",  # asks for the device of a weight, the first time it runs
    "timm:naflexvit_base_patch16_gap",
    "timm:regnety_002",
    "timm:starnet_s050",
]


@dataclass(frozen=True)
class Entry:
    """One network: how to build it with random weights, and the side of the smallest image it was found to take."""

    library: Literal["torchvision", "timm"]
    family: str
    name: str
    size: int = SMALL
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return self.name if self.library == "torchvision" else f"timm:{self.name}"

    def build(self) -> nn.Module:
        if self.library == "torchvision":
            import torchvision

            return torchvision.models.get_model(self.name, weights=None, **self.arguments)
        import timm

        return timm.create_model(self.name, pretrained=False, **self.arguments)


def entries() -> list[Entry]:
    import torchvision

    names = torchvision.models.list_models(module=torchvision.models)
    return [_torchvision(name) for name in names] + [Entry("timm", *rest) for rest in TIMM]


def _torchvision(name: str) -> Entry:
    import torchvision

    family = torchvision.models.get_model_builder(name).__module__.rpartition(".")[2]
    size, arguments = SIZES.get(family, (SMALL, {}))
    if family == "vision_transformer" and name.endswith("14"):
        size = 56  # whole patches
    if family == "vision_transformer":
        arguments = {"image_size": size}
    return Entry("torchvision", family, name, size, arguments)


# What 64 pixels are not enough for; truncated-normal initialisation in scipy takes a minute and is not needed.
SIZES: dict[str, tuple[int, dict[str, Any]]] = {
    "inception": (96, {"aux_logits": False, "init_weights": False}),
    "googlenet": (SMALL, {"aux_logits": False, "init_weights": False}),
    "maxvit": (224, {}),
}

# (family, name[, side of the image[, builder arguments]]). Families whose smallest member has over 60 million
# parameters and takes widths are built narrower.
TIMM: list[tuple[Any, ...]] = [
    ("beit", "beit_base_patch16_224", 64, {"embed_dim": 192, "depth": 4, "num_heads": 3, "img_size": 64}),
    ("byoanet", "eca_botnext26ts_256", 64, {"img_size": 64}),
    ("byobnet", "mobileone_s0"),
    ("cait", "cait_xxs24_224", 64, {"img_size": 64}),
    ("coat", "coat_tiny", 64, {"img_size": 64}),
    ("convit", "convit_tiny", 64, {"img_size": 64}),
    ("convmixer", "convmixer_768_32"),
    ("convnext", "convnext_atto"),
    ("cpubone", "cpubone_nano"),
    ("crossvit", "crossvit_tiny_240", 64, {"img_size": 120}),
    ("csatv2", "csatv2"),
    ("cspnet", "cs3darknet_s"),
    ("davit", "davit_tiny"),
    ("deepseek_vit", "deepseek_vit_412m", 70, {"embed_dim": 192, "depth": 4, "num_heads": 3, "num_classes": 1000}),
    ("deit", "deit_tiny_patch16_224", 64, {"img_size": 64}),
    ("densenet", "densenet121"),
    ("dla", "dla46_c"),
    ("dpn", "dpn48b"),
    ("edgenext", "edgenext_xx_small"),
    ("efficientformer", "efficientformer_l1", 224),
    ("efficientformer_v2", "efficientformerv2_s0", 64, {"img_size": 64}),
    ("efficientnet", "efficientnet_b0"),
    ("efficientvim", "efficientvim_m1"),
    ("efficientvit_mit", "efficientvit_b0"),
    ("efficientvit_msra", "efficientvit_m0", 64, {"img_size": 64}),
    ("eva", "eva02_tiny_patch14_224", 64, {"num_classes": 1000, "img_size": 64}),
    ("fasternet", "fasternet_t0"),
    ("fastvit", "fastvit_t8"),
    ("focalnet", "focalnet_tiny_srf"),
    ("gcvit", "gcvit_xxtiny", 64, {"img_size": 64}),
    (
        "gemma4_vit",
        "gemma4_vit_167m",
        64,
        {
            "embed_dim": 192,
            "depth": 4,
            "num_heads": 3,
            "intermediate_size": 768,
            "position_embedding_size": 64,
            "num_classes": 1000,
        },
    ),
    ("ghostnet", "ghostnet_050"),
    ("hardcorenas", "hardcorenas_a"),
    ("hgnet", "hgnetv2_b0"),
    ("hiera", "hiera_tiny_224", 64, {"img_size": 64}),
    ("hieradet_sam2", "sam2_hiera_tiny", 64, {"num_classes": 1000}),
    ("hrnet", "hrnet_w18_small"),
    ("iformer", "iformer_t"),
    ("inception_next", "inception_next_atto"),
    ("inception_resnet_v2", "inception_resnet_v2", 96),
    ("inception_v3", "inception_v3", 96),
    ("inception_v4", "inception_v4", 96),
    ("lcnetv2", "lcnetv2_small"),
    ("levit", "levit_128s", 64, {"img_size": 64}),
    ("lowformer", "lowformer_b0"),
    ("mambaout", "mambaout_femto"),
    ("maxxvit", "maxvit_pico_rw_256", 64, {"img_size": 64}),
    ("metaformer", "poolformer_s12"),
    ("mlp_mixer", "gmlp_ti16_224", 64, {"img_size": 64}),
    ("mobilenetv3", "mobilenetv3_small_050"),
    ("mobilenetv5", "mobilenetv5_base", 64, {"channel_multiplier": 0.5}),
    ("mobilevit", "mobilevit_xxs"),
    ("mvitv2", "mvitv2_tiny"),
    ("naflexvit", "naflexvit_base_patch16_gap", 64, {"embed_dim": 192, "depth": 4, "num_heads": 3}),
    ("nasnet", "nasnetalarge"),
    ("nest", "nest_tiny", 64, {"img_size": 64}),
    ("nextvit", "nextvit_small"),
    ("nfnet", "nf_regnet_b0"),
    ("pit", "pit_ti_224", 64, {"img_size": 64}),
    ("pnasnet", "pnasnet5large"),
    ("pvt_v2", "pvt_v2_b0"),
    ("qwen3_vit", "qwen3_vit_88m", 64, {"embed_dim": 192, "depth": 4, "num_heads": 3, "num_classes": 1000}),
    ("rdnet", "rdnet_tiny"),
    ("regnet", "regnety_002"),
    ("repghost", "repghostnet_050"),
    ("repvit", "repvit_m0_9"),
    ("res2net", "res2net50_14w_8s"),
    ("resnest", "resnest14d"),
    ("resnet", "resnet18"),
    ("resnetv2", "resnetv2_18"),
    ("rexnet", "rexnet_100"),
    ("selecsls", "selecsls42"),
    ("senet", "legacy_seresnet18"),
    ("sequencer", "sequencer2d_s"),
    ("shvit", "shvit_s1"),
    ("sknet", "skresnet18"),
    ("starnet", "starnet_s050"),
    ("swiftformer", "swiftformer_xs"),
    ("swin_transformer", "swin_tiny_patch4_window7_224", 64, {"img_size": 64}),
    ("swin_transformer_v2", "swinv2_tiny_window8_256", 64, {"img_size": 64}),
    ("swin_transformer_v2_cr", "swinv2_cr_tiny_224", 64, {"img_size": 64}),
    ("tiny_vit", "tiny_vit_5m_224", 64, {"num_classes": 1000}),
    ("tnt", "tnt_s_patch16_224", 64, {"img_size": 64}),
    ("tresnet", "tresnet_m"),
    ("twins", "twins_svt_small"),
    ("vgg", "vgg11"),
    ("visformer", "visformer_tiny", 64, {"img_size": 64}),
    ("vision_transformer", "vit_tiny_patch16_224", 64, {"img_size": 64}),
    ("vision_transformer_hybrid", "vit_tiny_r_s16_p8_224", 64, {"img_size": 64}),
    ("vision_transformer_relpos", "vit_relpos_small_patch16_224", 64, {"img_size": 64}),
    (
        "vision_transformer_sam",
        "samvit_base_patch16_224",
        64,
        {"embed_dim": 192, "depth": 4, "num_heads": 3, "img_size": 64, "global_attn_indexes": (1, 3)},
    ),
    ("vitamin", "vitamin_small_224", 64, {"num_classes": 1000, "img_size": 64}),
    ("volo", "volo_d1_224", 64, {"img_size": 64}),
    ("vovnet", "ese_vovnet19b_dw"),
    ("xception", "legacy_xception"),
    ("xception_aligned", "xception41"),
    ("xcit", "xcit_nano_12_p16_224"),
]
