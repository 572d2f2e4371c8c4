"""What writes text: a model that is only used, with what makes tokens of text and text of tokens."""

from __future__ import annotations

import codecs
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from infinity.api import hugging_face
from infinity.api.checkpoint import Progress
from infinity.api.engine import Engine, engine_of
from infinity.api.inference import find_model, inference, texts_of
from infinity.core.config import Config
from infinity.core.errors import ConfigError, DataError, InfinityError

from .output import check_of_transformers
from .workload import check_bytes, tokenizer_in

#: Is told the next token of each row, as it is made.
Told = Callable[[list[int]], None]


class Writer:
    """A model of transformers that writes text, by its own `generate`.

    Attributes:
        context: the most tokens that it takes, with those that it writes; None: any number.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str) -> None:
        self.model, self._tokenizer, self.name = model, tokenizer, name
        text = model.config.get_text_config()
        context = getattr(text, "max_position_embeddings", None)
        self.context = int(context) if context and not model.config.is_encoder_decoder else None

    @property
    def engine(self) -> Engine:
        """That of the model."""
        return engine_of(self.model)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt."""
        if self._tokenizer is None:
            return list(text.encode())
        return [int(token) for token in self._tokenizer(text)["input_ids"]]

    def decoder(self) -> Callable[[int, bool], str]:
        """Return what gives the text that one more token makes, and with True all that is left."""
        if self._tokenizer is None:
            of_bytes = codecs.getincrementaldecoder("utf-8")("replace")
            return lambda token, last: of_bytes.decode(bytes([token if token < 256 else 0x3F]), last)
        tokens: list[int] = []
        shown = [0]

        def of_tokens(token: int, last: bool) -> str:
            tokens.append(token)
            text = str(self._tokenizer.decode(tokens, skip_special_tokens=True))
            if text.endswith("\N{REPLACEMENT CHARACTER}") and not last:
                return ""  # of a letter that takes more than one token
            piece = text[shown[0] :]
            shown[0] = len(text)
            return piece

        return of_tokens

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens that were written."""
        decoded = self.decoder()
        return "".join(decoded(token, i == len(tokens) - 1) for i, token in enumerate(tokens))

    def check(self, rows: Sequence[Sequence[int]], count: int) -> None:
        """Raise `ConfigError` if a prompt has no tokens, or is too long to write `count` after it."""
        for number, row in enumerate(rows):
            if not row:
                raise ConfigError(
                    f"prompt {number + 1} has no tokens",
                    expected="at least one letter",
                    found="an empty text",
                    cure="--prompt TEXT",
                )
            if self.context is not None and len(row) + count > self.context:
                room = self.context - len(row)
                raise ConfigError(
                    f"prompt {number + 1} and what is to be written are longer than the model can take",
                    expected=f"at most {self.context} tokens",
                    found=f"{len(row)} + {count}",
                    cure=f"--tokens {room}" if room > 0 else "a shorter prompt",
                )

    def write(
        self,
        rows: Sequence[Sequence[int]],
        count: int,
        *,
        temperature: float,
        seed: int,
        told: Told,
        top_k: int = 0,
    ) -> list[list[int]]:
        """Return up to `count` tokens after each of some prompts, and tell of them as they are made. With
        what the model's directory says of writing, but for sampling and beams.

        Args:
            rows: tokens of prompts, of any lengths.
            temperature: 0: the likeliest token, always.
            seed: of what is drawn with another temperature.
            top_k: how many of the likeliest tokens are drawn from; 0: all.

        Raises:
            DataError: the model's outputs are no finite numbers, or transformers refuses what the directory
                says; tokens before that were told.
        """
        device = self.engine.device.torch_device
        after = self.model.config.is_encoder_decoder
        longest = max(map(len, rows))
        ids, mask = torch.zeros(2, len(rows), longest, dtype=torch.int64)
        chosen = copy.deepcopy(self.model.generation_config)
        chosen.update(do_sample=temperature > 0, temperature=temperature or 1.0, top_k=50, top_p=1.0)
        if temperature > 0:
            chosen.update(top_k=top_k)
            torch.manual_seed(seed)
        chosen.update(num_beams=1, max_new_tokens=count, max_length=None, return_dict_in_generate=False)
        ends = chosen.eos_token_id if isinstance(chosen.eos_token_id, list) else [chosen.eos_token_id]
        if chosen.pad_token_id is None:
            chosen.pad_token_id = ends[0] if ends[0] is not None else 0
        ids.fill_(chosen.pad_token_id)
        for i, row in enumerate(rows):
            place = slice(0, len(row)) if after else slice(longest - len(row), longest)
            ids[i, place], mask[i, place] = torch.tensor(row), 1
        try:
            made = self.model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                generation_config=chosen,
                streamer=_Streamer(told),
                logits_processor=[_check_finite],
            )
        except (ValueError, TypeError, AttributeError, IndexError) as error:
            if isinstance(error, InfinityError):
                raise
            raise DataError(
                f"transformers does not write text with {self.name}",
                expected="a generation_config.json and a tokenizer that belong to the model",
                found=f"{type(error).__name__}: {error}",
                cure="check the directory",
            ) from error
        written = made.tolist()
        return [_upto(row[1:] if after else row[longest:], ends) for row in written]


def _upto(tokens: list[int], ends: Sequence[int | None]) -> list[int]:
    """Return tokens up to the first that ends a text."""
    for i, token in enumerate(tokens):
        if token in ends:
            return tokens[: i + 1]
    return tokens


class _Streamer:
    """What `generate` tells of its tokens: first the prompts, then one of each row at a time."""

    def __init__(self, told: Told) -> None:
        self._told = told
        self._begun = False

    def put(self, value: torch.Tensor) -> None:
        if self._begun:
            self._told(value.reshape(-1).tolist())
        self._begun = True

    def end(self) -> None:
        """All is told."""


def _check_finite(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Return the scores of the next tokens, if they are numbers. On a GPU a draw from others would end the
    process's use of the device."""
    if not scores.amax(-1).isfinite().all():
        raise DataError(
            "the model's outputs are not finite numbers",
            expected="a model that has not diverged",
            found="NaN or infinity among them",
            cure="an earlier checkpoint, or a training with a lower --lr",
        )
    return scores


def open_writer(directory: str, config: Config, progress: Progress | None = None) -> Writer:
    """Return what writes with the model in a directory: of Hugging Face, or with checkpoints.

    Raises:
        DataError: there is none that writes; or what `inference` raises.
    """
    if hugging_face.is_directory_of_a_model(directory):
        return _of_transformers(directory, directory, config, progress)
    found = find_model(directory)
    with texts_of(found) as texts:
        if hugging_face.is_directory_of_a_model(texts):
            return _of_transformers(found.path, texts, config, progress)
    check_of_transformers(found)
    raise DataError(
        f"the checkpoint {found.path} does not say what its model is",
        expected="one of a model of transformers",
        found="no config.json in its index",
        cure="build the model, and read its values: infinity.inference(model, config, weights=DIR)",
    )


def _of_transformers(directory: str, texts: str, config: Config, progress: Progress | None) -> Writer:
    told = hugging_face.read_config(texts)
    if isinstance(told, dict):
        raise DataError(
            f"the model in {directory!r} does not write text",
            expected="a model of transformers",
            found=f"the {told.get('_class_name')} of diffusers",
            cure="name the directory of a causal language model, or of one with an encoder and a decoder",
        )
    tokenizer = tokenizer_in(texts)
    if tokenizer is None:
        check_bytes(directory, int(told.get_text_config().vocab_size))
    if not hugging_face.class_of(texts, told).can_generate():
        raise DataError(
            f"the model in {directory!r} does not write text",
            expected="a class of transformers that has `generate`",
            found=", ".join(told.architectures or ()) or told.model_type,
            cure="name the directory of a causal language model, or of one with an encoder and a decoder",
        )
    model = inference(directory, config, progress=progress)
    return Writer(model, tokenizer, f"{told.model_type} from {directory}")
