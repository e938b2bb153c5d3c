"""CelebA by celebrity, as prepared by LEAF."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from fedloom.base.checks import one_of
from fedloom.base.documentation import bibtex
from fedloom.base.errors import DataError
from fedloom.base.ranges import Count
from fedloom.data.sources import Source, natural_clients, sources
from fedloom.data.sources.arrays import image_arrays, read_images
from fedloom.data.sources.files import Files, reads
from fedloom_apps.readers.formats import read_words

LICENCE = "the authors' own: research, not commercial"
FILES = Files(
    "CelebA",
    (("celeba/img_align_celeba/", "celeba/list_attr_celeba.txt", "celeba/identity_CelebA.txt"),),
    "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html",
    {
        "img_align_celeba.zip": "md5 00d2c5bc6d35e252742224ab0c1e8fcb",
        "list_attr_celeba.txt": "md5 75e246fa4810816ffd6ee81facbd244c",
        "identity_CelebA.txt": "md5 32bd1bd63d3c78cd57e08160ec5ed1e2",
    },
)
HALF = (0.5, 0.5, 0.5)


@sources.register
@reads(FILES)
def celeba(
    attribute: str = "Smiling",
    size: Count = 84,
    people: Count | None = None,
    least: Count = 5,
    root: str | Path | None = None,
    normalise: bool = True,
) -> Source:
    """CelebA (LEAF): 200 288 faces of 9343 celebrities, with a binary label (smiling or not), by celebrity.

    Reads ``celeba/img_align_celeba/*.jpg``, ``celeba/list_attr_celeba.txt`` and ``celeba/identity_CelebA.txt``. There
    is no common test set: each client's own test samples are a fraction of its images (``held_out``). Decoded images
    are cached beside them in ``fedloom-*.npz``. At 84 pixels the full set takes 21 GB of memory while reading, then 17
    GB.

    Args:
        attribute: the one of 40 attributes that is the label.
        size: height and width, 84 in LEAF; images (178 x 218) are scaled, not cropped.
        people: number of celebrities to keep, in the order of their ids; by default all.
        least: images that a celebrity must have, 5 in LEAF.
        normalise: whether to scale to -1..1; otherwise 0..1.
    """
    folder, attributes, identities = FILES.obtain(root)
    who: dict[str, int] = {}
    for line, words in enumerate(read_words(identities), 1):
        if words and (len(words) != 2 or not words[1].isdecimal()):
            raise DataError(f"{identities}, line {line}: expected a picture and a person's number.")
        who |= {words[0]: int(words[1])} if words else {}
    count = Counter(who.values())
    persons = sorted(person for person, n in count.items() if n >= least)[:people]
    if not persons:
        raise DataError(f"{identities} lists no person with at least {least} images.")
    lines = read_words(attributes)
    heads = lines[1] if len(lines) > 1 else []
    one_of("CelebA has no attribute", attribute, heads)
    person_set, column, rows = set(persons), heads.index(attribute) + 1, []
    for line, words in enumerate(lines[2:], 3):
        if not words or who.get(words[0]) not in person_set:
            continue
        if len(words) != len(heads) + 1 or words[column] not in ("1", "-1"):
            raise DataError(f"{attributes}, line {line}: expected a picture and {len(heads)} times 1 or -1.")
        rows.append((words[0], words[column] == "1", who[words[0]]))
    if len(rows) != sum(count[person] for person in persons):
        raise DataError(f"{attributes} and {identities} do not list the same images.")
    names, labels, owners = zip(*sorted(rows, key=lambda row: (row[2], row[0])), strict=True)
    x = read_images("CelebA", [folder / name for name in names], size, folder.parent / f"fedloom-{size}.npz")
    y = np.array(labels, dtype=np.int64)
    classes = (f"not {attribute}", attribute)
    train = image_arrays(x, y, classes, normalise, HALF, HALF)
    return Source(
        name="celeba",
        train=train,
        test=train.take(np.zeros(0, np.int64)),
        licence=LICENCE,
        citation=bibtex("liu2015deep, caldas2018leaf"),
        **natural_clients(owners, prefix="celebrity "),
        settings={"attribute": attribute, "size": size, "people": people, "least": least, "normalise": normalise},
    )
