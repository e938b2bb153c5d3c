"""Texts of a table become tokens, each by itself, so that clients need no common vocabulary."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.reviews import BAD, GOOD, NEITHER, reviews

import fedloom as fl
from fedloom.base.errors import ConfigError, DataError, FedLoomError
from fedloom.core.local import Local
from fedloom.data.sources import Source, sources
from fedloom.data.texts import padded, tokens
from fedloom.models import models
from fedloom_apps.online.streams import InOrder, task_stream


def read(folder: Path, frame: pd.DataFrame, **settings: Any) -> Source:
    """The source of a table of texts."""
    frame.to_csv(folder / "texts.csv", index=False)
    return sources.make("text", path=str(folder / "texts.csv"), **settings)


def test_a_text_has_the_same_tokens_whoever_else_is_there(tmp_path: Path) -> None:
    frame = reviews(20)
    settings = {"text": "review", "label": "said", "client": "user", "words": 50, "length": 5}
    all_rows, some_rows = read(tmp_path, frame, **settings), read(tmp_path, frame.iloc[7:12], **settings)
    assert torch.equal(all_rows.train.x[7:12], some_rows.train.x)
    assert all_rows.train.x.dtype == torch.int64
    assert all_rows.train.x.shape == (20, 5)
    assert 0 < int(all_rows.train.x.min()) <= int(all_rows.train.x.max()) < 50
    assert all_rows.train.names == ("no", "yes")
    assert all_rows.group_names == ("user 0", "user 1", "user 2")


def test_texts_are_cut_at_their_end_and_padded_at_their_beginning() -> None:
    rows = tokens(["a b c d", "A, b", ""], "words", 1000, length=3)
    a, comma, b, c = (tokens([word], "words", 1000)[0][0] for word in ("a", ",", "b", "c"))
    assert rows == [[a, b, c], [a, comma, b], []]
    assert padded(rows, "words", 4).tolist() == [[0, a, b, c], [0, a, comma, b], [0, 0, 0, 0]]


def test_the_next_byte_is_predicted_within_one_clients_texts(tmp_path: Path) -> None:
    frame = pd.DataFrame({"text": ["abc", "xyz", "de", "w"], "who": ["ann", "bob", "ann", "bob"]})
    source = read(tmp_path, frame, label=None, client="who", tokenizer="bytes", length=3)
    texts = {owner: "\n".join(frame.text[frame.who == owner]) + "\n" for owner in ("ann", "bob")}
    for row, (x, y) in enumerate(zip(source.train.x, source.train.y, strict=True)):
        text = texts[source.group_names[source.groups[row]]]  # type: ignore[index]
        at = text.index(bytes((x - 1).tolist()).decode())
        assert bytes((y - 1).tolist()).decode() == text[at + 1 : at + 4]
    assert source.groups is not None
    assert source.groups.tolist() == [0, 0, 1]  # 7 and 6 bytes; the last window of bob's would lack a next byte
    assert source.train.classes == 257


@pytest.mark.exhaustive
def test_a_network_learns_the_next_byte(tmp_path: Path) -> None:
    source = read(tmp_path, pd.DataFrame({"text": ["abcd" * 40] * 8}), label=None, tokenizer="bytes", length=20)
    net = models.make("stacked_lstm", classes=257, inputs=(20,), hidden=16, layers=1, positions="every")
    local = Local(epochs=4, batch_size=8, lr=1.0, momentum=0.9, clip=1.0)
    result = fl.run("fedavg", fl.data.federate(source, "iid", clients=2), net, rounds=10, local=local, compute="live")
    assert result.summary["final"]["clients/accuracy/mean"] > 0.9


def test_a_stream_of_texts_in_time(tmp_path: Path) -> None:
    frame = reviews(12).assign(day=np.arange(12)[::-1])
    source = read(tmp_path, frame, text="review", label="said", time="day", length=6)
    assert torch.equal(source.train.x, read(tmp_path, frame.iloc[::-1], text="review", label="said", length=6).train.x)
    assert len(task_stream(source, InOrder(train=2, test=1))) == 4


@pytest.mark.parametrize(
    ("settings", "changed", "error", "sentence"),
    [
        ({}, {}, DataError, "has no column 'text'; there are: review, said, user"),
        ({"text": "revew"}, {}, DataError, "has no column 'revew'; did you mean 'review'?"),
        ({"text": "review", "client": "who"}, {}, DataError, "has no column 'who'"),
        ({"text": "review"}, {"review": None}, DataError, "column 'review' has missing values in 30 of 30 rows"),
        ({"text": "review"}, {"review": 7}, DataError, "column 'review' does not hold texts; data=table:FILE"),
        ({"text": "review", "words": 1}, {}, ConfigError, "words must be at least 2, not 1"),
        ({"text": "review", "length": 0}, {}, ConfigError, "length must be"),
        ({"text": "review", "label": None, "tokenizer": "bytes", "length": 0}, {}, ConfigError, "length must be"),
        ({"text": "review"}, {"said": None}, DataError, "said"),
        ({"text": "review", "label": None}, {}, ConfigError, "hashed words cannot be predicted; choose"),
        ({"text": "review", "label": None, "tokenizer": "bytes", "length": 9999}, {}, DataError, "smaller data.length"),
        ({"text": "review", "tokenizer": "./nowhere"}, {}, FedLoomError, "tokeniser './nowhere'"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_sentence(
    settings: dict[str, Any], changed: dict[str, Any], error: type[Exception], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=re.escape(sentence)) as refused:
        read(tmp_path, reviews(30).assign(**changed), **{"label": "said", **settings})
    assert "\n" not in str(refused.value)


@pytest.mark.extra("tokenizers", "transformers")
def test_a_tokeniser_of_transformers_pads_as_its_network_expects(tmp_path: Path) -> None:
    transformers, tokenizers = map(import_module, ("transformers", "tokenizers"))
    vocabulary = {word: number for number, word in enumerate(["[UNK]", "[PAD]", *GOOD, *BAD, *NEITHER])}
    word_level = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    word_level.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    pretrained = transformers.PreTrainedTokenizerFast(tokenizer_object=word_level, unk_token="[UNK]", pad_token="[PAD]")
    pretrained.save_pretrained(tmp_path / "tokeniser")
    source = read(tmp_path, reviews(40), text="review", label="said", tokenizer=str(tmp_path / "tokeniser"), length=8)
    expected = [[*(vocabulary[word] for word in text.split()), 1, 1] for text in reviews(40).review]
    assert source.train.x.tolist() == expected
    assert source.settings["vocabulary"] == len(vocabulary)
    small = {
        "vocab_size": len(vocabulary),
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "pad_token_id": 1,
    }
    net = models.make("transformers", classes=2, inputs=(8,), network="bert", config=small)
    model = fl.run("fedavg", fl.data.federate(source, "iid", clients=2), net, rounds=1).trained.server
    assert torch.equal(model.predict(list(reviews(40).review)), model.predict(source.train.x))
