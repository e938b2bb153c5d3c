"""ISIC 2019 by centre, as FLamby divides it."""

from __future__ import annotations

import numpy as np

from fedloom.core.errors import DataError
from fedloom.core.federation import Arrays
from fedloom.data.sources.base import Source, sources
from fedloom.data.sources.files import Files, reads
from fedloom.data.sources.folders import read_pictures
from fedloom.data.sources.images import image_arrays
from fedloom.data.sources.tables import read_table

CITATION = """@article{tschandl2018ham10000,
  author = {Tschandl, Philipp and Rosendahl, Cliff and Kittler, Harald},
  title = {The {HAM10000} dataset},
  journal = {Scientific Data},
  volume = {5}, pages = {180161},
  year = {2018}
}
@inproceedings{codella2018skin,
  author = {Codella, Noel C. F. and others},
  title = {Skin lesion analysis toward melanoma detection},
  booktitle = {IEEE International Symposium on Biomedical Imaging},
  year = {2018}
}
@article{combalia2019bcn20000,
  author = {Combalia, Marc and others},
  title = {{BCN20000}: dermoscopic lesions in the wild},
  journal = {arXiv preprint arXiv:1908.02288},
  year = {2019}
}
@inproceedings{ogier2022flamby,
  author = {Ogier du Terrail, Jean and others},
  title = {{FLamby}: datasets and benchmarks for cross-silo federated learning in realistic healthcare settings},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2022}
}"""
TABLE = "isic2019/train_test_split"
FILES = Files(
    "ISIC 2019",
    (
        (TABLE, "isic2019/ISIC_2019_Training_Input_preprocessed/"),
        (TABLE, "isic2019/ISIC_2019_Training_Input/"),
    ),
    "https://challenge.isic-archive.com/data/#2019 (pictures) and FLamby's repository, "
    "flamby/datasets/fed_isic2019/dataset_creation_scripts (train_test_split)",
)
DIAGNOSES = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
CENTRES = ("BCN", "HAM vidir_molemax", "HAM vidir_modern", "HAM rosendahl", "MSK4", "HAM vienna_dias")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, for models trained on it


@sources.register
@reads(FILES)
def isic2019(size: int = 128, root: str | None = None, normalise: bool = True) -> Source:
    """ISIC 2019 (FLamby): 23 247 dermoscopic images of 8 diagnoses from 6 centres.

    Reads FLamby's table ``isic2019/train_test_split`` (columns ``image``, ``target``, ``center``, ``fold2``) and
    ``isic2019/ISIC_2019_Training_Input_preprocessed/*.jpg`` (as FLamby's scripts leave them: colour constancy applied,
    shorter side 224) or, without those, the original ``isic2019/ISIC_2019_Training_Input/*.jpg``. One hospital's three
    cameras are three centres. FLamby's split by centre gives the training pool and the test set: for a client's own
    test samples as in FLamby use ``held_out=natural``. Decoded images are kept beside them in ``fedloom-*.npz``.

    Args:
        size: height and width; the shorter side becomes this long and the middle is cut out. FLamby trains on 200,
            which takes 14 GB of memory while it is read, then 11 GB; 128 takes 6 GB.
        root: the data folder; by default $FEDLOOM_DATA, then ~/.cache/fedloom.
        normalise: by ImageNet's mean and deviation per channel, otherwise 0..1.
    """
    table, folder = FILES.obtain(root)
    rows = list(read_table(table, ["image", "target", "center", "fold2"]))
    for image, target, centre, fold in rows:
        if (
            target not in set("01234567")
            or centre not in set("012345")
            or fold not in (f"train_{centre}", f"test_{centre}")
        ):
            raise DataError(f"{table}: {image} has target {target}, centre {centre} and fold {fold}, which cannot be.")
    if not rows:
        raise DataError(f"{table} lists no images.")
    y = np.array([int(target) for _, target, _, _ in rows])
    centre = np.array([int(centre) for _, _, centre, _ in rows])
    test = np.array([fold.startswith("test") for *_, fold in rows])
    cache = folder.parent / f"fedloom-{folder.name}-{size}.npz"
    x = read_pictures("ISIC 2019", [folder / f"{row[0]}.jpg" for row in rows], size, cache, crop=True)

    def arrays(part: np.ndarray) -> Arrays:
        return image_arrays(x[part], y[part], DIAGNOSES, normalise, MEAN, STD)

    return Source(
        name="isic2019",
        train=arrays(~test),
        test=arrays(test),
        licence="CC BY-NC 4.0",
        citation=CITATION,
        groups=centre[~test],
        groups_test=centre[test],
        group_names=CENTRES,
        settings={"size": size, "pictures": folder.name, "normalise": normalise},
    )
