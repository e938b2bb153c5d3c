"""MQP: whether two medical questions ask the same, by the doctor who labelled them."""

from __future__ import annotations

import numpy as np
import torch

from fedloom.core.errors import ConfigError, DataError
from fedloom.core.federation import Arrays
from fedloom.data.sources.base import Source, numbered, sources
from fedloom.data.sources.files import Files, reads
from fedloom.data.sources.tables import read_table
from fedloom.data.sources.wordpiece import pair, read_vocabulary

CITATION = """@inproceedings{mccreery2020effective,
  author = {McCreery, Clara H. and Katariya, Namit and Kannan, Anitha and Chablani, Manish and Amatriain, Xavier},
  title = {Effective transfer learning for identifying similar questions: matching user questions to {COVID-19} {FAQs}},
  booktitle = {ACM SIGKDD International Conference on Knowledge Discovery and Data Mining},
  year = {2020}
}"""
FILES = Files(
    "MQP",
    (("mqp/mqp.csv", "mqp/vocab.txt"),),
    "https://github.com/curai/medical-question-pair-dataset (mqp.csv) and "
    "https://huggingface.co/distilbert/distilbert-base-uncased (vocab.txt)",
    {"mqp.csv": "md5 06c0121fe60cefa3cdf4d49a637dcaa6"},
)


@sources.register
@reads(FILES)
def mqp(length: int = 200, root: str | None = None) -> Source:
    """MQP: 3048 pairs of medical questions, similar or not, by doctor.

    Reads ``mqp/mqp.csv`` (without a header: doctor, question, question, label) and ``mqp/vocab.txt``, the vocabulary of
    the uncased DistilBERT (its WordPiece is done here, without the transformers library). Inputs are int64
    [N, length]: ``[CLS] first question [SEP] second question [SEP]``, then ``[PAD]``, number 0, which models mask. The
    11 doctors are the natural clients. There is no common test set: a client's own test pairs are a share of its pairs
    (``held_out``).

    Args:
        length: pieces in a sequence; longer pairs are cut.
        root: the data folder; by default $FEDLOOM_DATA, then ~/.cache/fedloom.
    """
    if length < 5:
        raise ConfigError(f"MQP needs sequences of at least 5 pieces, not {length}.")
    table, vocab = FILES.obtain(root)
    vocabulary = read_vocabulary(vocab)
    rows = list(read_table(table, header=False, width=4))
    if not rows:
        raise DataError(f"{table} lists no pairs.")
    if strange := next((row for row in rows if row[3] not in ("0", "1") or not row[0].isdigit()), None):
        raise DataError(
            f"{table} has a row for doctor {strange[0]!r} with label {strange[3]!r}, not a number and 0 or 1."
        )
    x = torch.tensor([pair(first, second, vocabulary, length) for _, first, second, _ in rows])
    train = Arrays(x, torch.tensor([int(row[3]) for row in rows]), 2, ("different", "similar"))
    groups, _, names = numbered(np.array([int(row[0]) for row in rows]))
    return Source(
        name="mqp",
        train=train,
        test=train.take(np.zeros(0, np.int64)),
        licence="as stated in its repository",
        citation=CITATION,
        groups=groups,
        group_names=tuple(f"doctor {name}" for name in names),
        settings={"length": length, "vocabulary": len(vocabulary)},
    )
