"""A causal language model from transformers, with new weights, on prepared text.

Legend of shapes: B samples, T tokens of a sample, N = B T, V vocabulary, C what the output head takes for a token.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from paceline.errors import ConfigError, did_you_mean
from paceline.models import chunked_cross_entropy
from paceline.tasks.text import Prepare, TextTask

__all__ = ["CausalLM"]

_PROBE_TOKENS = 8

_NOT_TO_BE_SET = {
    "vocab_size": "It is the data's; for a bare .bin set task.init_args.vocabulary",
    "dtype": "Weights are float32; recipe.precision: bf16 computes in bfloat16",
}
"""Arguments of a configuration that are decided elsewhere, and where."""


class CausalLM(TextTask):
    """Next-token prediction with a model that transformers builds from its configuration (extra ``[hf]``).

    The weights are new, and nothing is downloaded. The vocabulary is the data's, the longest sequence the context.

    Args:
        data: directory made by ``paceline prepare``, or a headerless ``.bin`` of little-endian uint16 tokens.
        model_type: what transformers calls the architecture: ``gpt2``, ``llama``, ``qwen3``, ...
        config: arguments of its configuration by name, such as ``n_layer`` or ``hidden_size``; the others keep the
            architecture's defaults, which mean billions of parameters for some.
        context: tokens of a sample.
        vocabulary: different tokens; ``null``: what the data's index says. A ``.bin`` needs it.
        prepare: how to make ``data`` on first use if it is not there.
    """

    can_chunk_loss: ClassVar[bool] = True

    def __init__(
        self,
        data: str,
        model_type: str = "gpt2",
        config: dict[str, Any] | None = None,
        context: int = 256,
        vocabulary: int | None = None,
        prepare: Prepare | None = None,
    ) -> None:
        super().__init__(data, context, vocabulary, prepare)
        self.model_type, self.config = model_type, dict(config or {})

    def build_model(self) -> nn.Module:
        """What ``AutoModelForCausalLM.from_config`` makes, in float32.

        Raises:
            ConfigError: transformers is not installed, does not know the model type or a name in ``config``, refuses a
                value, or builds a model that looks at tokens to come, or, with `loss_chunks`, one whose logits are not
                what its output head returns.
        """
        transformers = _transformers()
        arguments = self._arguments(_known_arguments(transformers, self.model_type))
        try:
            config = transformers.AutoConfig.for_model(self.model_type, **arguments)
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except Exception as error:  # each architecture has its own way to refuse
            raise ConfigError(
                f"cannot build the {self.model_type} model",
                found=f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}",
                needed="values that transformers accepts",
                fix="Mend task.init_args.config",
            ) from error
        if not isinstance(next(model.parameters()), FakeTensor):  # of shapes alone there are no outputs to look at
            self._check_causal(model)
            if self.loss_chunks is not None:
                self._check_head(model)
        return model

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
        """Cross entropy in nats, summed over the tokens in float32, and how many those are.

        It is that of the next token alone, without what some architectures add, such as a loss for a router's balance.
        """
        tokens_BT, targets_BT = batch
        if self.loss_chunks is not None:
            head, hidden_BTC = _hidden(model, tokens_BT)
            hidden_NC, targets_N = hidden_BTC.flatten(0, 1), targets_BT.flatten()
            loss = chunked_cross_entropy(hidden_NC, head.weight, targets_N, chunks=self.loss_chunks, bias_V=head.bias)
            return loss, targets_BT.numel()
        logits_BTV: Tensor = model(input_ids=tokens_BT).logits
        logits_NV = logits_BTV.float().flatten(0, 1)
        return F.cross_entropy(logits_NV, targets_BT.flatten(), reduction="sum"), targets_BT.numel()

    def _arguments(self, known: Mapping[str, str]) -> dict[str, Any]:
        """Those of the configuration: ours, and the user's over them. ``known``: every name, and what it stands for."""
        for name in self.config:
            if name not in known:
                raise ConfigError(
                    f"cannot use task.init_args.config.{name}",
                    found="an unknown name",
                    needed=f"an argument of the {self.model_type} configuration",
                    fix=did_you_mean(name, known),
                )
        given = {known[name]: value for name, value in self.config.items()}
        if "vocab_size" not in known.values():
            raise ConfigError(
                f"cannot build the {self.model_type} model",
                found="a configuration without vocab_size, made of several",
                needed="that of a language model alone",
                fix=f"Look for a model type of its text model, such as {self.model_type}_text",
            )
        for name, fix in _NOT_TO_BE_SET.items():
            if name in given:
                raise ConfigError(
                    "cannot use task.init_args.config",
                    found=f"{name}={given[name]!r}",
                    needed="it to be left out",
                    fix=fix,
                )
        positions = known.get("max_position_embeddings", "")
        if given.get(positions, self.context) < self.context:
            raise ConfigError(
                "cannot use task.init_args.config",
                found=f"{positions}={given[positions]!r}, context={self.context}",
                needed=f"{positions} >= context",
                fix=f"Leave out {positions}; it is the context then",
            )
        corpus = self._corpus_if_needed()
        tokenizer = None if corpus is None else corpus.tokenizer
        ours = {
            "vocab_size": self.vocabulary,
            positions: self.context,
            "bos_token_id": None,
            "eos_token_id": None if tokenizer is None else tokenizer.end_of_text,
            "pad_token_id": None,  # in some architectures the embedding of a padding token learns nothing
            "use_cache": False,
            "is_decoder": True,  # without it, architectures made as encoders look at tokens to come
        }
        return {name: value for name, value in ours.items() if name in known.values()} | given

    def _check_causal(self, model: nn.Module) -> None:
        """Looks whether another last token changes what is said of the tokens before it."""
        tokens_2T = self._probe()
        tokens_2T[1, -1] = self.vocabulary - 1
        with _looking_at(model):
            first_TV, second_TV = model(input_ids=tokens_2T).logits[:, :-1]
        if len(first_TV) and float((first_TV - second_TV).abs().max()) > 1e-3 * float(first_TV.std()):
            raise ConfigError(
                f"cannot train the {self.model_type} model to predict the next token",
                found="outputs that depend on tokens to come",
                needed="an architecture that only looks back",
                fix="Use another task.init_args.model_type, such as gpt2 or llama",
            )

    def _check_head(self, model: nn.Module) -> None:
        """Looks whether the output head returns the logits: with others in their place, these must come out."""
        head = cast(Any, model).get_output_embeddings()
        if not isinstance(head, nn.Linear):
            self._refuse_chunks(f"an output head of class {type(head).__name__}")
        told: list[Tensor] = []

        def tell(_module: nn.Module, _arguments: Any, logits_BTV: Tensor) -> Tensor:
            told.append(torch.linspace(-1e4, 1e4, logits_BTV.numel()).view_as(logits_BTV))
            return told[-1]

        with _looking_at(model), head.register_forward_hook(tell):
            logits_BTV = model(input_ids=self._probe()).logits
        if len(told) != 1 or not torch.equal(logits_BTV, told[0]):
            self._refuse_chunks("logits that are changed after the output head, as by a scale or a cap")

    def _refuse_chunks(self, found: str) -> NoReturn:
        raise ConfigError(
            f"cannot split the loss of the {self.model_type} model",
            found=found,
            needed="logits as one linear output head returns them",
            fix="Leave out recipe.loss_chunks, or use another task.init_args.model_type, such as gpt2 or llama",
        )

    def _probe(self) -> Tensor:
        return torch.zeros(2, min(self.context, _PROBE_TOKENS), dtype=torch.int64)


@contextmanager
def _looking_at(model: nn.Module) -> Iterator[None]:
    """Without dropout and gradients; in training mode again afterwards, as a new model is."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()


def _hidden(model: Any, tokens_BT: Tensor) -> tuple[nn.Linear, Tensor]:
    """The output head, and what it is given, (B, T, C), while it computes nothing: it sees none of the tokens."""
    head: nn.Linear = model.get_output_embeddings()
    given: list[Tensor] = []

    def take(_module: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
        given.append(arguments[0])
        return (arguments[0][:, :0],)

    with head.register_forward_pre_hook(take):
        model(input_ids=tokens_BT)
    return head, given[0]


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "cannot build a model of transformers",
            found=str(error),
            needed="transformers",
            fix="Install it: pip install 'paceline[hf]'",
        ) from error
    return transformers


def _known_arguments(transformers: Any, model_type: str) -> dict[str, str]:
    """Every argument of an architecture's configuration, and its other names, with the argument that each stands for.

    Raises:
        ConfigError: transformers knows no causal language model of that type.
    """
    types = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if model_type not in types:
        near = did_you_mean(model_type, types)
        raise ConfigError(
            "cannot use task.init_args.model_type",
            found=f"model_type={model_type!r}",
            needed=f"one of the {len(types)} causal language models of transformers {transformers.__version__}",
            fix=near if near.startswith("Did") else "Use gpt2, llama, mistral, qwen3 or another one",
        )
    cls = transformers.CONFIG_MAPPING[model_type]
    makers = [owner.__dict__["__init__"] for owner in cls.__mro__[:-1] if "__init__" in owner.__dict__]
    names = {name for maker in makers for name in inspect.signature(maker).parameters} - {"self", "kwargs"}
    return {name: name for name in names} | {"attn_implementation": "attn_implementation"} | dict(cls.attribute_map)
