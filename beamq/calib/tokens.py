"""The checkpoint's own tokenizer: text to ids, conversations to text, and the separator.

In: a checkpoint folder. Out: a `CheckpointTokenizer`.

Text goes through `tokenizer.json` with the `tokenizers` library, which loads in milliseconds and
runs nothing that the checkpoint brought. Only conversations need transformers, for the chat
template (rendered in its sandbox); `trust_remote_code` is never given. Special tokens are neither
added nor escaped: text that was rendered with a chat template beforehand means what it says.

The separator between documents is the tokenizer's `eos_token`, or `eos_token_id` of config.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beamq.config import read_json_object
from beamq.errors import CalibrationError, MissingDependencyError


class CheckpointTokenizer:
    """Encode text and render conversations as the checkpoint in `folder` would."""

    def __init__(self, folder: Path) -> None:
        """Raises `CalibrationError` where `folder` has no usable tokenizer.json or separator."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CalibrationError(
                f"{path}: not found; calibration needs the checkpoint's tokenizer."
                " Copy tokenizer.json and tokenizer_config.json next to config.json"
            )
        try:
            from tokenizers import Tokenizer  # late: only runs that calibrate need it
        except ImportError as fault:
            raise MissingDependencyError(f"calibration needs `tokenizers`: {fault}") from fault
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(path))
        except Exception as fault:  # the library raises plain Exception for anything unreadable
            raise CalibrationError(f"{path}: not a tokenizer: {str(fault)[:120]}") from fault
        # A saved tokenizer may truncate or pad every text to the length it was last used with.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._folder = folder
        self._chat: Any = None
        model = _optional_json(folder / "config.json")
        vocabulary = model.get("vocab_size")
        self._vocab_size = vocabulary if isinstance(vocabulary, int) else None
        self.separator = self._separator(model)

    def encode(self, text: str) -> NDArray[np.int64]:
        """Token ids [T] of a text, without special tokens around it."""
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        ids = np.asarray(encoded.ids, dtype=np.int64)
        if self._vocab_size is not None and ids.size and int(ids.max()) >= self._vocab_size:
            raise CalibrationError(
                f"{self._folder / 'tokenizer.json'}: yields id {int(ids.max())}, but config.json"
                f" has vocab_size {self._vocab_size}; the tokenizer belongs to another model"
            )
        return ids

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """A conversation as the chat template writes it; None where the template refuses it.

        Templates refuse on purpose (roles that don't alternate, say); that is the row's fault.
        A tokenizer without a template is an error: no row could be used.
        """
        if self._chat is None:
            self._chat = self._load_chat()
        try:
            return str(self._chat.apply_chat_template(list(messages), tokenize=False))
        except Exception:  # a template is a program: it may raise whatever it likes
            return None

    def _load_chat(self) -> Any:
        try:
            from transformers import AutoTokenizer  # late: a second, and `messages` are rare
        except ImportError as fault:
            raise MissingDependencyError(f"`messages` need transformers: {fault}") from fault
        try:
            chat = AutoTokenizer.from_pretrained(
                str(self._folder), trust_remote_code=False, local_files_only=True
            )
        except Exception as fault:  # many kinds, none of them documented
            raise CalibrationError(
                f"{self._folder}: the tokenizer's chat template cannot be loaded:"
                f" {str(fault)[:120]}. Use data with a `text` column"
            ) from fault
        if not chat.chat_template:
            raise CalibrationError(
                f"{self._folder}: data has `messages`, but the tokenizer has no chat template;"
                " use data with a `text` column, or add chat_template.jinja"
            )
        return chat

    def _separator(self, model: dict[str, Any]) -> int:
        token = _optional_json(self._folder / "tokenizer_config.json").get("eos_token")
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            found = self._tokenizer.token_to_id(token)
            if found is not None:
                return int(found)
        ids = model.get("eos_token_id")
        first = ids[0] if isinstance(ids, list) and ids else ids
        if isinstance(first, int) and not isinstance(first, bool) and first >= 0:
            return first
        raise CalibrationError(
            f"{self._folder}: no end-of-text token (eos_token in tokenizer_config.json, or"
            " eos_token_id in config.json); calibration separates documents with it"
        )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json_object(path, CalibrationError) if path.is_file() else {}
