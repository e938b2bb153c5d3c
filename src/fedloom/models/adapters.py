"""Networks from elsewhere with ``features`` and a ``head``: any PyTorch module, and those of optional packages.

Packages are imported on use; parameters can be loaded from a local file.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedloom.base.errors import ConfigError, first_line, import_extra, in_words, nearest
from fedloom.base.files import readable_path
from fedloom.base.ranges import NonNegativeInt
from fedloom.models.classifier import Classifier, image, models, shape


class Wrapped(nn.Module):
    """A module cut before its head: ``forward(x) == head(features(x))``, parameters ``body.…`` and ``head.…``.

    Attributes:
        body: the module without its head, from inputs [B, ...] to features [B, d].
        head: from features [B, d] to logits [B, C].
        place: the head's name in the module.
    """

    def __init__(self, module: nn.Module, head: str) -> None:
        super().__init__()
        self.body, self.place = module, head
        self.head = module.get_submodule(head)
        self._fill(nn.Identity())

    def features(self, x: Tensor) -> Tensor:
        """Features [B, d] of samples [B, ...]."""
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, C] of samples [B, ...]."""
        try:
            return self.head(self.body(x))
        except Exception as error:
            self._blame_head(x, error)
            raise

    def uncut(self, x: Tensor) -> Tensor:
        """The output [B, C] of the original module, with the head in its place."""
        self._fill(self.head)
        try:
            return self.body(x)
        finally:
            self._fill(nn.Identity())

    def _blame_head(self, x: Tensor, error: Exception) -> None:
        """Raise ``ConfigError`` if an error is due to the cut: the head's inputs are not what the body returns."""
        try:
            self.uncut(x)
        except Exception:  # the module itself fails, too
            return
        raise ConfigError(
            f"layer {self.place!r} cannot be cut off as the head: {first_line(error)}; it is not the last layer, or "
            "has no forward of its own, so choose the layer whose output is the module's."
        ) from error

    def _fill(self, module: nn.Module) -> None:
        owner, _, name = self.place.rpartition(".")
        setattr(self.body.get_submodule(owner), name, module)


def wrap(module: nn.Module, head: str, sample: Tensor | None = None) -> Wrapped:
    """A copy of any module with ``features`` and ``head``, which personal heads, prototypes and similar parts need.

    The module is cut before its head, which must come last: that ``head(features(x))`` is the module's output is
    checked on ``sample``, and on samples of the data before a run begins.

    Args:
        module: any module from inputs [B, ...] to logits [B, C].
        head: the name of its last layer, like ``fc``, ``classifier`` or ``classifier.2``; it may consist of several.
        sample: inputs [B, ...] for an immediate check.

    Raises:
        ConfigError: if there is no such layer, it shares parameters with others, or it does not come last.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> model = wrap(net, head="3", sample=torch.ones(1, 2, 2))
    >>> model.features(torch.ones(5, 2, 2)).shape, model.head
    (torch.Size([5, 3]), Linear(in_features=3, out_features=2, bias=True))
    >>> [name for name, _ in model.named_parameters()]
    ['body.1.weight', 'body.1.bias', 'head.weight', 'head.bias']
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"wrap takes a module, not {in_words(module)}; call the function that makes it.")
    names = [name for name, _ in module.named_modules() if name]
    if head not in names:
        raise ConfigError(f"{type(module).__name__} has no layer {head!r} to be its head; {nearest(head, names)}")
    owned = {id(p) for p in module.get_submodule(head).parameters()}
    model = Wrapped(copy_module(module), head)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in owned and not name.startswith(f"{head}."):
            raise ConfigError(f"layer {head!r} shares a parameter with {name!r}, so that it cannot be cut off.")
    if sample is not None:
        check(model, sample)
    return model


def check(model: nn.Module, sample: Tensor) -> None:
    """Check that ``head(features(x))`` is a model's output, and that of the module that it wraps."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            cut = model.head(model.features(sample))  # type: ignore[operator]
            output = model.uncut(sample) if isinstance(model, Wrapped) else model(sample)
    except Exception as error:
        if not isinstance(model, Wrapped) or isinstance(error, ConfigError):
            raise
        model._blame_head(sample, error)
        raise ConfigError(f"layer {model.place!r} cannot be cut off as the head: {first_line(error)}.") from error
    finally:
        model.train(training)
    tolerance = 1e-5 if cut.dtype == torch.float32 else 1e-9
    if cut.shape == output.shape and torch.allclose(cut, output, rtol=tolerance, atol=tolerance, equal_nan=True):
        return
    if isinstance(model, Wrapped):
        raise ConfigError(
            f"layer {model.place!r} is not the last one: what it returns, {list(cut.shape)}, is not what the module "
            "returns; choose the layer whose output is the module's, and leave out what follows it, such as a softmax."
        )
    raise ConfigError(f"head(features(x)) of {type(model).__name__} is not its forward(x), as methods need.")


def remedy(model: nn.Module) -> str:
    """The remedy for a module without ``features`` and ``head``, as the end of an error message.

    >>> remedy(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
    "wrap the module, like fedloom.wrap(module, head='1')."
    """
    linear = [name for name, module in model.named_modules() if name and isinstance(module, nn.Linear)]
    last = linear[-1] if linear else "fc"
    return f"wrap the module, like fedloom.wrap(module, head={last!r})."


def copy_module(module: nn.Module) -> nn.Module:
    """A copy of a module."""
    try:
        return copy.deepcopy(module)
    except Exception as error:
        raise ConfigError(
            f"the model cannot be copied: {first_line(error, 90)}; take torch.nn.utils.parametrizations for normalised "
            "weights, and keep nothing in the module but layers, tensors without gradients and plain values."
        ) from error


class Copies:
    """A model factory that copies one module, whose parameters are the initial ones of every run."""

    def __init__(self, module: nn.Module) -> None:
        self.module = copy_module(module)

    def __call__(self) -> nn.Module:
        return copy.deepcopy(self.module)


_SIZES = """
    activation activation_dropout activation_function attention_bias attention_dropout
    attention_probs_dropout_prob attn_pdrop bos_token_id classifier_activation classifier_dropout
    classifier_dropout_prob d_ff d_kv d_model depths dim downsample_in_bottleneck downsample_in_first_stage
    drop_path_rate dropout dropout_rate embd_pdrop embed_dim embedding_size encoder_attention_heads
    encoder_ffn_dim encoder_layers encoder_stride eos_token_id ffn_dim head_dim hidden_act hidden_activation
    hidden_dim hidden_dropout hidden_dropout_prob hidden_size hidden_sizes image_size initializer_range
    intermediate_size layer_norm_eps layer_norm_epsilon layer_scale_init_value layer_type layerdrop
    mask_token_id max_position_embeddings mlp_bias mlp_ratio n_ctx n_embd n_head n_heads n_inner n_layer
    n_layers n_positions norm_epsilon num_attention_heads num_channels num_heads num_hidden_groups
    num_hidden_layers num_key_value_heads num_layers num_stages pad_token_id patch_norm patch_size
    position_embedding_type qkv_bias resid_pdrop rms_norm_eps rope_theta rotary_pct seq_classif_dropout
    sep_token_id sinusoidal_pos_embds sliding_window strides summary_first_dropout type_vocab_size
    use_absolute_embeddings use_bias vocab_size window_size
"""
CONFIGURABLE = frozenset(_SIZES.split())
"""The keys of a network's configuration that ``config`` sets: sizes, rates and kinds of layers, none that names code or
files."""
TRUST = {"trust_remote_code": False}  # whatever a folder or the hub says
EXTRAS = {"torchvision": "vision", "timm": "zoo", "transformers": "text", "peft": "text"}


def _package(model: str, name: str) -> Any:
    return import_extra(EXTRAS[name.partition(".")[0]], name, f"model {model!r}")


def _make(model: str, make: Any, *args: Any, **settings: Any) -> Any:
    """Call a package's factory; report its errors in one sentence."""
    try:
        return make(*args, **settings)
    except Exception as error:
        raise ConfigError(f"model {model!r} could not be created: {first_line(error)}") from error


@models.register
def efficientnet_b0(
    *, classes: int, inputs: tuple[int, ...], pretrained: bool = False, dropout: float = 0.1
) -> Classifier:
    """torchvision's EfficientNet-B0 (Tan and Le, 2019): convolutions, a mean over 7x7 cells, dropout, a linear head.

    The end, with 62,720 features, is that of Hahn (2024) for ISIC 2019. Normalisation is by batch.

    Args:
        inputs: (3, height, width) of one image.

    Raises:
        ConfigError: if torchvision cannot be imported, or samples are not colour images.
    """
    if image("efficientnet_b0", classes, inputs)[0] != 3:
        raise ConfigError(f"model 'efficientnet_b0' needs images of three channels, but a sample has shape {inputs}.")
    zoo = _package("efficientnet_b0", "torchvision.models")
    weights = zoo.EfficientNet_B0_Weights.DEFAULT if pretrained else None
    net = _make("efficientnet_b0", zoo.efficientnet_b0, weights=weights)
    channels = net.classifier[-1].in_features
    body = nn.Sequential(net.features, nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Dropout(dropout))
    return Classifier(body, 49 * channels, classes)


@models.register
def timm(
    *,
    classes: int,
    inputs: tuple[int, ...],
    network: str = "vit_tiny_patch16_224",
    pretrained: bool = False,
    head: bool = False,
    weights: str | Path | None = None,
) -> Classifier | Wrapped:
    """Any image network of timm; by default its smallest vision transformer (Dosovitskiy et al., 2021).

    Layers between pooling and the last linear one, as in MobileNetV3 or VGG, belong to the body.

    Args:
        inputs: (channels, height, width) of one image; networks for one size only are made for this one.
        network: timm's name of the network.
        pretrained: whether to start from timm's parameters, which are downloaded.
        head: whether to keep the network's own classifier, trained for just these classes; otherwise the last layer is
            a new one.
        weights: a file of the network's parameters on this machine, ``.safetensors`` or one written by ``torch.save``,
            to start from. Without ``head`` its classifier is left out.

    Raises:
        ConfigError: if timm cannot be imported, has no such network, the network does not take such images, or the
            classifier or the file does not fit.
    """
    colours, height, width = image("timm", classes, inputs)
    if pretrained and weights:
        raise ConfigError("model 'timm' starts from one set of parameters; give pretrained=true or weights=, not both.")
    package = _package("timm", "timm")
    cfg = _make("timm", package.get_pretrained_cfg, network)
    sized = {"img_size": (height, width)} if getattr(cfg, "fixed_input_size", False) else {}
    own_classes = getattr(cfg, "num_classes", classes)
    if head and pretrained and own_classes != classes:
        raise ConfigError(
            f"model 'timm': the classifier of {network!r} has {own_classes} classes, but the data have {classes}; "
            "leave out head=true."
        )
    settings = {"pretrained": pretrained, "num_classes": classes if head else 0, "in_chans": colours, **sized}
    net = _make("timm", package.create_model, network, **settings)
    if weights:
        layers = getattr(cfg, "classifier", None) or ()  # the name of one, or those of several
        left_out = () if head else [f"{layer}." for layer in ([layers] if isinstance(layers, str) else layers)]
        load_weights(net, Path(weights), f"network {network!r}", left_out)
    if head:
        place = next((name for name, layer in net.named_modules() if layer is net.get_classifier()), None)
        if place is None or not isinstance(net.get_classifier(), nn.Linear):
            raise ConfigError(
                f"model 'timm': the classifier of {network!r} is not a linear layer; leave head=true out."
            )
        return wrap(net, place)
    net.eval()
    with torch.no_grad():
        features = _make("timm", net, torch.zeros(2, colours, height, width))
    return Classifier(net.train(), features.shape[-1], classes)


class Logits(nn.Module):
    """A classifier of transformers from one tensor, tokens [B, T] or images [B, C, H, W], to its logits [B, ...]."""

    def __init__(self, net: nn.Module, padding: int | None) -> None:
        super().__init__()
        self.net, self.padding = net, padding

    def forward(self, x: Tensor) -> Tensor:
        if self.padding is None:
            return self.net(pixel_values=x).logits
        return self.net(input_ids=x, attention_mask=(x != self.padding).to(torch.int64)).logits


@models.register(name="transformers")
def transformer(
    *,
    classes: int,
    inputs: tuple[int, ...],
    network: str = "distilbert",
    pretrained: bool = False,
    config: dict[str, Any] | None = None,
    lora: NonNegativeInt = 0,
    lora_targets: tuple[str, ...] = (),
) -> Wrapped:
    """Any classifier of transformers for sequences of tokens or for images; its last linear layer is the head.

    With low-rank adapters (Hu et al., ICLR 2022), y = Wx + 2BAx, the encoder's own parameters are constants: only A
    and B and what follows the encoder are trained and sent. ``method.personal=private_lora`` keeps B at the clients.

    Args:
        inputs: (T,), the length of a sequence, or (channels, height, width) of one image.
        network: a folder with a network's ``config.json``, its name on the hub, or a kind of network, like ``bert``
            or ``vit``, with random parameters.
        pretrained: whether to load the folder's parameters; otherwise they are random.
        config: changes to the network's configuration, like ``{num_hidden_layers: 2}``: the sizes, rates and kinds of
            layers in ``CONFIGURABLE``. No network runs code of its folder.
        lora: rank r of the adapters; 0 trains all parameters.
        lora_targets: endings of the names of the layers that get adapters; by default all linear layers of the encoder.

    Raises:
        ConfigError: if transformers or peft cannot be imported, the network cannot be made or has no linear
            head, or ``config`` has another key.
    """
    _check_config(config or {})
    package = _package("transformers", "transformers")
    pictures = len(inputs) == 3
    options = {**(config or {}), "num_labels": classes}
    if pictures:
        channels, height, width = image("transformers", classes, inputs)
        options = {"num_channels": channels, "image_size": height if height == width else (height, width), **options}
    else:
        shape("transformers", classes, inputs, 1, "sequences of token numbers, or images")
    auto = package.AutoModelForImageClassification if pictures else package.AutoModelForSequenceClassification
    if not pretrained and network in package.CONFIG_MAPPING:
        settings = _make("transformers", package.AutoConfig.for_model, network, **options)
    else:
        settings = _make("transformers", package.AutoConfig.from_pretrained, network, **options, **TRUST)
    if not pictures and getattr(settings, "pad_token_id", None) is None:
        settings.pad_token_id = 0
    if pretrained:
        net = _make("transformers", auto.from_pretrained, network, config=settings, **TRUST)
    else:
        net = _make("transformers", auto.from_config, settings, **TRUST)
    linear = [n for n, m in net.named_modules() if isinstance(m, nn.Linear) and m.out_features == classes]
    if not linear:
        raise ConfigError(f"model 'transformers': network {network!r} has no linear layer for {classes} classes.")
    if lora:
        _adapt(net, lora, lora_targets)
    return wrap(Logits(net, None if pictures else settings.pad_token_id), f"net.{linear[-1]}")


def _check_config(config: dict[str, Any]) -> None:
    """Raise ``ConfigError`` for a key that is not among ``CONFIGURABLE``, or whose value is neither number nor word."""
    for key, value in config.items():
        if key not in CONFIGURABLE:
            raise ConfigError(
                f"model 'transformers': config sets {key!r}, but it may set only sizes, rates and kinds of layers, "
                "whose keys are fedloom.models.adapters.CONFIGURABLE."
            )
        if not all(
            isinstance(item, bool | int | float | str) for item in (value if isinstance(value, list) else [value])
        ):
            raise ConfigError(f"model 'transformers': config.{key} must be a number, a word or a list of these.")


def _adapt(net: Any, rank: int, targets: tuple[str, ...]) -> None:
    """Give an encoder's linear layers low-rank adapters and freeze its own parameters."""
    peft = _package("transformers", "peft")
    encoder = net.base_model
    names = list(targets) or [n for n, m in encoder.named_modules() if isinstance(m, nn.Linear)]
    config = _make("transformers", peft.LoraConfig, r=rank, lora_alpha=2 * rank, target_modules=names)
    _make("transformers", peft.inject_adapter_in_model, config, encoder)


class Encoder(nn.Module):
    """A text encoder, its first token's state through a dense layer, ReLU and dropout: tokens [B, T] to [B, d].

    Padding tokens are masked.
    """

    def __init__(self, net: nn.Module, width: int, padding: int, dropout: float) -> None:
        super().__init__()
        self.net = net
        self.dense = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout))
        self.padding = padding

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(input_ids=x, attention_mask=(x != self.padding).to(torch.int64))
        return self.dense(out.last_hidden_state[:, 0])


@models.register
def distilbert(
    *,
    classes: int,
    inputs: tuple[int, ...],
    network: str = "distilbert-base-uncased",
    pretrained: bool = True,
    dropout: float = 0.1,
) -> Classifier:
    """DistilBERT of transformers (Sanh et al., 2019) on token numbers, with a dense layer of 768 before the head.

    Args:
        inputs: (T,), the length of a sequence; tokenise with the network's own tokeniser, as ``data=text`` does with
            ``data.tokenizer=NAME``.
        network: its name on the hub, or a local folder.

    Raises:
        ConfigError: if transformers cannot be imported, the network cannot be loaded, or samples are not sequences.
    """
    shape("distilbert", classes, inputs, 1, "sequences of token numbers")
    package = _package("distilbert", "transformers")
    if pretrained:
        net = _make("distilbert", package.AutoModel.from_pretrained, network, **TRUST)
    else:
        config = _make("distilbert", package.AutoConfig.from_pretrained, network, **TRUST)
        net = _make("distilbert", package.AutoModel.from_config, config, **TRUST)
    width = net.config.hidden_size
    return Classifier(Encoder(net, width, net.config.pad_token_id or 0, dropout), width, classes)


INSIDE = ("state_dict", "model")  # where training scripts put the parameters in what they save


def load_weights(net: nn.Module, path: Path, what: str, without: Sequence[str] = (), key: str = "weights") -> None:
    """Load all parameters and buffers of a network.

    Args:
        net: the network.
        path: a ``.safetensors`` file, or one written by ``torch.save``: tensors by name, also under ``state_dict`` or
            ``model``, and with the prefix ``module.`` of a parallel wrapper.
        what: the network in an error message, like ``network 'resnet18'``.
        without: prefixes of names in the file that are left out.
        key: the setting that names the file, in an error message.
    """
    stored = {name: t for name, t in read_weights(path, key).items() if not name.startswith(tuple(without))}
    fill(net, stored, f"{key}={path}", what)


def fill(net: nn.Module, stored: Mapping[str, Tensor], who: str, what: str) -> None:
    """Load stored tensors, ``who`` in an error message, if they are those of the network, ``what`` in it."""
    state_dict = net.state_dict()
    for name in (*state_dict, *stored):
        shapes = [list(tensors[name].shape) if name in tensors else None for tensors in (stored, state_dict)]
        if shapes[0] != shapes[1]:
            needs = shapes[1] if name in state_dict else "nothing"
            wrong = f"its {name} is {shapes[0]}, where {needs} is needed"
            wrong = wrong if name in stored else f"it has no {name}, of shape {needs}"
            raise ConfigError(f"{who} does not fit {what}: {wrong}.")
    if not any(t.is_meta for t in state_dict.values()):  # a network without memory is made for its shapes
        net.load_state_dict(stored)


def read_weights(path: Path, key: str) -> dict[str, Tensor]:
    """The tensors of such a file by name; ``key`` is the setting that names it, in an error message."""
    try:
        if path.suffix == ".safetensors":
            return load_file(readable_path(path))
        content = torch.load(readable_path(path), map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle fails in many ways
        raise ConfigError(f"{key}={path} cannot be read: {first_line(error, 150)}.") from error
    for key_inside in INSIDE:
        if isinstance(content, dict) and isinstance(content.get(key_inside), dict):
            content = content[key_inside]
    if not isinstance(content, dict) or not content or not all(isinstance(t, Tensor) for t in content.values()):
        raise ConfigError(f"{key}={path} holds no tensors by name; save a network's state_dict().")
    return {str(name).removeprefix("module."): t for name, t in content.items()}


class Several(nn.Module):
    """A list of networks for the same inputs and outputs; the output is that of the first."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    @classmethod
    def of(cls, factories: Sequence[Callable[[], nn.Module]]) -> Several:
        """The networks of factories."""
        return cls([make() for make in factories])

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, C] of the first network."""
        return self.networks[0](x)


@models.register
def several(
    classes: int, inputs: tuple[int, ...], names: tuple[str | Mapping[str, Any], ...] = ("mlp", "logistic")
) -> nn.Module:
    """Networks of different architecture for different clients (personal ``architectures``, ``own_architectures``).

    Args:
        classes: number of classes.
        inputs: shape of one sample.
        names: other models, each a name, or a mapping of its name and settings, like ``{name: mlp, hidden: [32]}``.

    Raises:
        ConfigError: if one of them is not a classifier of such samples.
    """
    networks = [models.of(name, classes=classes, inputs=inputs) for name in names]
    if not networks:
        raise ConfigError("model 'several' needs the names of at least one other model.")
    return Several(networks)
