"""What a model's structure and names say about the precision it needs.

Two ways to lose: fp16 runs out of range (beyond 65504, or below what its subnormals hold), bf16 runs out of digits (it
keeps 8 significant bits of float32's 24, fp16 keeps 11). Which of them threatens is guessed here from what is seen
without running anything: the kinds of layers, their sizes, and the words in their names. ``castwise study`` is the
proof.

Works on anything with ``named_modules`` and ``named_parameters`` and reads class names, so it imports no framework.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from castwise.errors import FormatError
from castwise.formats import BF16, NumberFormat, parse_format

__all__ = [
    "LayerShape",
    "ModelTraits",
    "Need",
    "Reading",
    "ShapeMiss",
    "count_in_words",
    "misaligned",
    "need_of",
    "read_model",
    "traits_of",
]

# Parameters from which a transformer counts as large. Runs in fp16 were reported to break down although the loss was
# scaled for OPT-175B (arXiv:2205.01068) and a 104B predecessor of BLOOM (arXiv:2211.05100); ten years of smaller ones
# were trained in fp16. The line between is drawn low: bf16 costs a large transformer nothing.
LARGE_TRANSFORMER = 1_000_000_000


_log = logging.getLogger("castwise.advise")


class Need(StrEnum):
    """What a model cannot do without."""

    range = "range"
    mantissa = "mantissa"
    either = "either"  # both 16-bit formats are known to do


@dataclass(frozen=True, slots=True)
class LayerShape:
    """A layer whose product runs on matrix units. ``dims`` are named sizes, such as ``("out_features", 10)``."""

    path: str
    kind: str  # "Linear", "Conv2d", …
    dims: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraits:
    """What is seen of a model without running it.

    Attributes:
        name: how it is called.
        parameters: number of parameters.
        kinds: how many layers of each kind: ``linear conv conv_transpose1d attention rnn batch_norm layer_norm
            embedding pixel_shuffle``.
        layers: the layers with products, in order.
        dtypes: parameters per dtype, by the format's short name.
        pretrained: the format the checkpoint was trained in, where the model's config tells.
        words: lower-case words of class names, module paths and the config's model type.
    """

    name: str
    parameters: int = 0
    kinds: Mapping[str, int] = field(default_factory=dict)
    layers: tuple[LayerShape, ...] = ()
    dtypes: Mapping[str, int] = field(default_factory=dict)
    pretrained: NumberFormat | None = None
    words: frozenset[str] = frozenset()

    def has(self, *kinds: str) -> bool:
        """Whether any layer is of one of these kinds."""
        return any(self.kinds.get(kind, 0) for kind in kinds)


@dataclass(frozen=True, slots=True)
class Reading:
    """One thing that the structure or a name says, with the need it points to."""

    need: Need
    text: str


# ------------------------------------------------------------------------------------------------------------- looking

_KINDS: tuple[tuple[str, str], ...] = (
    (r"ConvTranspose1d", "conv_transpose1d"),
    (r"Conv(?:Transpose)?[123]d|_ConvNd", "conv"),
    (r"Linear|NonDynamicallyQuantizableLinear|Conv1D", "linear"),  # Conv1D is how transformers calls GPT-2's linear
    (r"\w*Attention\w*|\w*Attn", "attention"),
    (r"RNNBase|LSTM|GRU|RNN|LSTMCell|GRUCell|RNNCell", "rnn"),
    (r"_BatchNorm|BatchNorm[123]d|SyncBatchNorm", "batch_norm"),
    (r"LayerNorm|RMSNorm|\w*LayerNorm|\w*RMSNorm|GroupNorm", "layer_norm"),
    (r"Embedding", "embedding"),
    (r"PixelShuffle", "pixel_shuffle"),
)

_ATTENTION_NAMES = frozenset({"attn", "self_attn", "attention", "self_attention", "cross_attn", "mha"})
_PROJECTION_NAMES = frozenset({"qkv", "qkv_proj", "q_proj", "to_q", "to_qkv", "c_attn", "query", "query_key_value"})


def traits_of(model: Any, name: str = "") -> ModelTraits:
    """Look at a model (``torch.nn.Module`` or alike) without running it."""
    kinds: Counter[str] = Counter()
    layers: list[LayerShape] = []
    functional = 0
    words: set[str] = set(_words(name)) | set(_words(type(model).__name__))
    for path, module in model.named_modules():
        last = path.rpartition(".")[2]
        kind = _kind(module) or ("attention" if last in _ATTENTION_NAMES else "")
        # Attention written as a function leaves its projections: one per layer stands for it, unless a class was seen.
        functional += last in _PROJECTION_NAMES
        words.update(_words(type(module).__name__), _words(path))
        if kind:
            kinds[kind] += 1
        shape = _shape(path, module)
        if shape is not None:
            layers.append(shape)
    if functional and not kinds["attention"]:
        kinds["attention"] = functional
    dtypes: Counter[str] = Counter()
    shapeless = 0
    for _, parameter in model.named_parameters():
        if hasattr(parameter, "materialize"):  # of a lazy module, whose sizes its first input decides
            shapeless += 1
            continue
        dtypes[_format_name(parameter.dtype)] += int(parameter.numel())
    if shapeless:
        _log.warning(
            "%s: %d parameters of lazy modules have no size yet and are left out; run a batch through the model first",
            name or type(model).__name__, shapeless,
        )  # fmt: skip
    config = getattr(model, "config", None)
    words.update(_words(str(getattr(config, "model_type", ""))))
    return ModelTraits(
        name=name or type(model).__name__,
        parameters=sum(dtypes.values()),
        kinds={kind: number for kind, number in kinds.items() if number},
        layers=tuple(layers),
        dtypes=dict(dtypes),
        pretrained=_pretrained(config, dtypes),
        words=frozenset(words),
    )


def _kind(module: Any) -> str:
    """The kind of a layer, by the names of its class and base classes, so that subclasses count as what they extend."""
    names = [base.__name__ for base in type(module).__mro__]
    return next((kind for pattern, kind in _KINDS if any(re.fullmatch(pattern, name) for name in names)), "")


def _shape(path: str, module: Any) -> LayerShape | None:
    kind = type(module).__name__
    if all(isinstance(getattr(module, key, None), int) for key in ("in_features", "out_features")):
        return _sized(path, kind, in_features=module.in_features, out_features=module.out_features)
    if all(isinstance(getattr(module, key, None), int) for key in ("in_channels", "out_channels", "groups")):
        if module.groups > 1:  # grouped products are small whatever the channels; depthwise ones use no matrix unit
            return None
        return _sized(path, kind, in_channels=module.in_channels, out_channels=module.out_channels)
    return None


def _sized(path: str, kind: str, **dims: int) -> LayerShape:
    """A layer with the sizes that are known: a lazy module has 0 where its first input decides."""
    return LayerShape(path, kind, tuple((name, size) for name, size in dims.items() if size > 0))


def _words(text: str) -> list[str]:
    """Lower-case words of a name: ``"SRResNet_x4.head"`` -> srresnet, x4, head, x, sr, res, net."""
    whole = re.findall(r"[A-Za-z][A-Za-z0-9]*", text)
    stems = [word.rstrip("0123456789") for word in whole]  # ResNet50 is a ResNet
    parts = re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+", text)
    return [word.lower() for word in (*whole, *stems, *parts)]


def _format_name(dtype: object) -> str:
    try:
        return parse_format(dtype).name
    except FormatError:
        return str(dtype).rpartition(".")[2]


def _pretrained(config: Any, dtypes: Mapping[str, int]) -> NumberFormat | None:
    """The format in which the weights were trained, if the config or the weights themselves say."""
    for key in ("torch_dtype", "dtype"):
        said = getattr(config, key, None)
        if said is not None:
            try:
                return parse_format(said)
            except FormatError:
                continue
    if dtypes and set(dtypes) == {BF16.name}:
        return BF16
    return None


# ------------------------------------------------------------------------------------------------------------- judging


@dataclass(frozen=True, slots=True)
class _Clue:
    """Words that name a kind of model, and what is known of that kind."""

    need: Need
    words: frozenset[str]
    text: str


def _clue(need: Need, words: str, text: str) -> _Clue:
    return _Clue(need, frozenset(words.split()), text)


_PIXELS = (
    "super-resolution is judged by small differences of pixels: just below 1, bf16's values are 1/256 apart, as far as "
    "the grey levels of an 8-bit image; fp16's are 1/2048 apart"
)
_WAVEFORMS = "speech synthesis makes 16-bit samples: bf16 holds 8 significant bits of them, fp16 holds 11"
_CONVNETS = (
    "convnets do as well in fp16 as in fp32: six on ImageNet did, ResNet-50 among them (arXiv:1710.03740, table 1); "
    "YOLO and U-Net are made of the same layers"
)
_CLUES = (
    _clue(Need.mantissa, "superresolution superres srresnet srgan esrgan realesrgan edsr rcan swinir srcnn", _PIXELS),
    _clue(
        Need.mantissa,
        "tts vocoder hifigan melgan bigvgan wavenet waveglow wavernn wavegrad tacotron fastspeech speecht",
        _WAVEFORMS,
    ),
    _clue(
        Need.mantissa,
        "policy actor critic actorcritic dqn ppo sac td3 ddpg qnetwork valuenet",
        "an RL policy compares probabilities that it computed at two times; rounding makes them differ, and bf16 "
        "rounds 8 times as coarsely as fp16, which removed the mismatch in arXiv:2510.26788",
    ),
    _clue(
        Need.range,
        "t5 mt5 umt5 flan ul2",
        "T5 and its kin were trained in bf16, and their feed-forward activations pass 65504 in fp16 "
        "(google-research/text-to-text-transfer-transformer issue 539)",
    ),
    _clue(
        Need.range,
        "moe router experts",
        "the router of a mixture of experts takes the softmax of unbounded logits; they can leave fp16's range",
    ),
    _clue(Need.either, "resnet resnext yolo yolov yolox unet vgg mobilenet efficientnet densenet convnet", _CONVNETS),
)


def read_model(traits: ModelTraits) -> tuple[Reading, ...]:
    """Everything that structure and names say; what needs nothing special is left out where something else does."""
    readings = [Reading(clue.need, clue.text) for clue in _CLUES if clue.words & traits.words]
    readings += _structure(traits)
    convnet = traits.has("conv") and not traits.has("attention", "rnn", "conv_transpose1d", "pixel_shuffle")
    if convnet and all(reading.text != _CONVNETS for reading in readings):
        readings.append(Reading(Need.either, f"{_count(traits, 'conv')} and no attention: {_CONVNETS}"))
    needy = [reading for reading in readings if reading.need is not Need.either]
    return tuple(needy or readings)


def _structure(traits: ModelTraits) -> Iterator[Reading]:
    if traits.has("attention") and traits.parameters >= LARGE_TRANSFORMER:
        yield Reading(
            Need.range,
            f"attention and {count_in_words(traits.parameters)} parameters: scores and outlier channels leave fp16's "
            f"range; large transformers broke down in fp16 despite loss scaling (arXiv:2205.01068, arXiv:2211.05100)",
        )
    elif traits.has("attention"):
        yield Reading(
            Need.either,
            f"attention and {count_in_words(traits.parameters)} parameters: scores grow with the width, so their "
            f"softmax stays in fp32 (the rules see to it); a transformer of this size trains in fp16 with loss scaling",
        )
    if traits.has("rnn"):
        yield Reading(
            Need.either,
            "recurrent layers make small gradients: fp16 needs its loss scaled (by 128 for the LSTM of "
            "arXiv:1710.03740), bf16 does not",
        )
    if traits.has("pixel_shuffle") and not traits.has("attention"):
        yield Reading(Need.mantissa, f"it ends in pixels ({_count(traits, 'pixel_shuffle')}): {_PIXELS}")
    if traits.has("conv_transpose1d"):
        yield Reading(Need.mantissa, f"it makes waveforms ({_count(traits, 'conv_transpose1d')}): {_WAVEFORMS}")


def count_in_words(number: int) -> str:
    """``"1.2 billion"``, ``"14.5 thousand"``, …: a count of parameters, rounded for reading."""
    for unit, size in (("billion", 10**9), ("million", 10**6), ("thousand", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _count(traits: ModelTraits, kind: str) -> str:
    names = {"conv": "convolution", "pixel_shuffle": "pixel shuffle", "conv_transpose1d": "transposed 1-d convolution"}
    number = traits.kinds[kind]
    return f"{number} {names[kind]}{'s' if number != 1 else ''}"


def need_of(readings: Iterable[Reading]) -> Need:
    """What the readings ask for together. Range before mantissa: an overflow ends a run, a rounding error blurs it."""
    needs = {reading.need for reading in readings}
    return Need.range if Need.range in needs else Need.mantissa if Need.mantissa in needs else Need.either


# -------------------------------------------------------------------------------------------------------------- shapes


@dataclass(frozen=True, slots=True)
class ShapeMiss:
    """A dimension that is no multiple of what the matrix units want: ``path.dim`` is ``size``, ``padded`` would do."""

    path: str
    kind: str
    dim: str
    size: int
    padded: int


def misaligned(layers: Iterable[LayerShape], multiple: int) -> tuple[ShapeMiss, ...]:
    """The dimensions of layers with products that are no multiple of ``multiple``, in the model's order."""
    return tuple(
        ShapeMiss(layer.path, layer.kind, dim, size, -(-size // multiple) * multiple)
        for layer in layers
        for dim, size in layer.dims
        if size % multiple
    )
