"""What writes text: a model that is only used, with what makes tokens of text and text of tokens."""

from __future__ import annotations

import abc
import codecs
import copy
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from infinity.api import hugging_face
from infinity.api.checkpoint import Progress, reading_ring
from infinity.api.engine import Engine, engine_of
from infinity.api.inference import find_model, inference, texts_of
from infinity.api.init import without_values
from infinity.api.user_state import decode
from infinity.core.config import Config
from infinity.core.errors import ConfigError, CorruptionError, DataError, InfinityError
from infinity.core.optional import optional
from infinity.storage.checkpoints import Found
from infinity.storage.tensor_file import read_all

from .settings import BUILT_IN_DTYPE, DataSettings, ModelSettings, RunSettings, TrainSettings
from .workload import BuiltIn, Workload, workload_of

#: Is told the next token of each row, as it is made.
Told = Callable[[list[int]], None]


class Writer(abc.ABC):
    """A model that writes text. `context`: the most tokens that it takes, with those that it writes."""

    name: str
    model: Any
    context: int | None
    _tokenizer: Any = None  # of transformers; None: tokens are bytes

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

    @abc.abstractmethod
    def write(
        self, rows: Sequence[Sequence[int]], count: int, *, temperature: float, seed: int, told: Told
    ) -> list[list[int]]:
        """Return up to `count` tokens after each of some prompts, and tell of them as they are made.

        Args:
            rows: tokens of prompts, of any lengths.
            temperature: 0: the likeliest token, always.
            seed: of what is drawn with another temperature.
        """


class _Transformers(Writer):
    """A model of transformers, by its own `generate`."""

    def __init__(self, model: Any, tokenizer: Any, name: str) -> None:
        self.model, self._tokenizer, self.name = model, tokenizer, name
        text = model.config.get_text_config()
        context = getattr(text, "max_position_embeddings", None)
        self.context = int(context) if context and not model.config.is_encoder_decoder else None

    def write(
        self, rows: Sequence[Sequence[int]], count: int, *, temperature: float, seed: int, told: Told
    ) -> list[list[int]]:
        """See `Writer`. With what the directory says of writing, but for sampling and beams."""
        device = self.engine.device.torch_device
        after = self.model.config.is_encoder_decoder
        longest = max(map(len, rows))
        ids, mask = torch.zeros(2, len(rows), longest, dtype=torch.int64)
        chosen = copy.deepcopy(self.model.generation_config)
        chosen.update(do_sample=temperature > 0, temperature=temperature or 1.0, top_k=50, top_p=1.0)
        if temperature > 0:
            chosen.update(top_k=0)
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


class _BuiltIn(Writer):
    """The GPT of `infinity.cli.model`, over bytes. There is no cache of keys and values: with offloaded
    parameters the load is what counts."""

    def __init__(self, workload: Workload, model: Any) -> None:
        self.model, self.name, self.context = model, workload.name, workload.context
        self._workload = workload

    def write(
        self, rows: Sequence[Sequence[int]], count: int, *, temperature: float, seed: int, told: Told
    ) -> list[list[int]]:
        """See `Writer`."""
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.tensor([len(row) for row in rows])
        # Padded behind: no token looks at what comes after it.
        tokens = torch.zeros(len(rows), int(lengths.max()) + count, dtype=torch.int64)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = torch.tensor(row)
        every, begins = torch.arange(len(rows)), lengths.clone()
        device = self.engine.device.torch_device
        for _ in range(count):
            with torch.no_grad():
                logits = self._workload.logits(self.model, tokens[:, : int(lengths.max())].to(device))
            last = logits[every, (lengths - 1).to(device)].float().cpu()
            if temperature > 0:
                shares = torch.softmax(last / temperature, -1)
                following = torch.multinomial(shares, 1, generator=generator)[:, 0]
            else:
                following = last.argmax(-1)
            tokens[every, lengths] = following
            lengths += 1
            told(following.tolist())
        return [tokens[i, begin : begin + count].tolist() for i, begin in enumerate(begins.tolist())]


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
    workload, dtype = _workload_of(found)
    with without_values():
        model = workload.build(recompute=False)
    if config.dtype is None:
        config = config.replace(dtype=dtype)
    return _BuiltIn(workload, inference(model, config, weights=found.path, progress=progress))


def _of_transformers(directory: str, texts: str, config: Config, progress: Progress | None) -> Writer:
    told = hugging_face.read_config(texts)
    if isinstance(told, dict):
        raise DataError(
            f"the model in {directory!r} does not write text",
            expected="a model of transformers",
            found=f"the {told.get('_class_name')} of diffusers",
            cure="name the directory of a causal language model, or of one with an encoder and a decoder",
        )
    tokenizer = _tokenizer_in(texts)
    if tokenizer is None and int(told.get_text_config().vocab_size) < 256:
        raise DataError(
            f"the model in {directory!r} has no tokenizer, and too few tokens for bytes",
            expected="a tokenizer, or a vocabulary of at least 256",
            found=f"a vocabulary of {told.get_text_config().vocab_size}",
            cure="put the model's tokenizer beside it",
        )
    if not hugging_face.class_of(texts, told).can_generate():
        raise DataError(
            f"the model in {directory!r} does not write text",
            expected="a class of transformers that has `generate`",
            found=", ".join(told.architectures or ()) or told.model_type,
            cure="name the directory of a causal language model, or of one with an encoder and a decoder",
        )
    model = inference(directory, config, progress=progress)
    return _Transformers(model, tokenizer, f"{told.model_type} from {directory}")


def _tokenizer_in(directory: str) -> Any:
    """Return the tokenizer in a directory; None, if there is none."""
    [AutoTokenizer] = optional("transformers", "hf", "AutoTokenizer")
    names = os.listdir(directory)
    if not any(n.startswith("tokenizer") or n in ("vocab.json", "vocab.txt", "spiece.model") for n in names):
        return None
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a file that is not what it should be makes of its parser
        raise DataError(
            f"the tokenizer in {directory!r} cannot be read",
            expected="a tokenizer of transformers",
            found=f"{type(error).__name__}: {error}",
            cure="check the directory, or update transformers",
        ) from error


def _workload_of(found: Found) -> tuple[Workload, Any]:
    """Return the built-in model that a checkpoint of `infinity train` is of, and in which dtype it was."""
    content = found.content
    try:
        path = found.file("values")
        with reading_ring() as ring:
            values = {} if path is None else read_all(path, ring, content["crcs"]["values"])
        run = decode(content["state"], values, found.path)["train"]["run"]
        settings = RunSettings(
            ModelSettings(**run["model"]), DataSettings(), TrainSettings(sequence=run["train"]["sequence"])
        )
        workload, dtype = workload_of(settings), run["engine"].get("dtype") or BUILT_IN_DTYPE
    except (KeyError, TypeError, AttributeError, CorruptionError) as error:
        raise DataError(
            f"the checkpoint {found.path} does not say what its model is",
            expected="one of a model of transformers, or of `infinity train`",
            found=repr(error),
            cure="build the model, and read its values: infinity.inference(model, config, weights=DIR)",
        ) from error
    if not isinstance(workload, BuiltIn):
        raise DataError(
            f"the checkpoint {found.path} does not say what its model is",
            expected="the config of a model of transformers",
            found="only the directory that it was trained from",
            cure="save it again with this version of infinity",
        )
    return workload, dtype
