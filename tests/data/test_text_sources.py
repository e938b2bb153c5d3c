"""Readers of LEAF's files, text and sound, on small sets in the original formats."""

import json
import wave
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from fedloom.base.errors import ConfigError, DataError
from fedloom.data import federate, sources
from fedloom_apps.readers.mqp import pair
from fedloom_apps.readers.shakespeare import ALPHABET

RNG = np.random.default_rng(0)
pytestmark = pytest.mark.usefixtures("no_data_folder")


def write_leaf(folder: Path, users: dict[str, tuple[list, list]], per_file: int = 2) -> None:
    """LEAF's files, so many users in each."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(users)
    for number, start in enumerate(range(0, len(names), per_file)):
        file_users = names[start : start + per_file]
        content = {
            "users": file_users,
            "num_samples": [len(users[name][1]) for name in file_users],
            "user_data": {name: dict(zip("xy", users[name], strict=True)) for name in file_users},
        }
        (folder / f"all_data_{number}_niid_0_keep_0_train_9.json").write_text(json.dumps(content))


def writers(n: int) -> dict[str, tuple[list, list]]:
    return {f"f{k:04}_{k}": (RNG.random((n, 784)).round(3).tolist(), [k, 61][:n]) for k in range(3)}


def test_femnist(tmp_path: Path) -> None:
    train = writers(2)
    write_leaf(tmp_path / "femnist/data/train", train)
    write_leaf(tmp_path / "femnist/data/test", writers(1))
    source = sources.make("femnist", root=str(tmp_path))
    assert source.train.x.shape == (6, 1, 28, 28)
    assert (source.train.x.dtype, source.train.classes, source.train.names[61]) == (torch.float32, 62, "z")
    torch.testing.assert_close(source.train.x[2].flatten(), torch.tensor(train["f0001_1"][0][0]))
    federation = federate(source, "natural", held_out="natural")
    assert federation.names == ("writer f0000_0", "writer f0001_1", "writer f0002_2")
    assert federation.held_out.index.sizes.tolist() == [1, 1, 1]
    (tmp_path / "femnist/data/train").rename(tmp_path / "femnist/data/all_data")
    pool = sources.make("femnist", root=str(tmp_path))
    assert (len(pool.train), len(pool.test), pool.groups_test) == (6, 0, None)


def test_damaged_leaf_files_get_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "femnist/data/all_data"
    make = lambda: sources.make("femnist", root=str(tmp_path))  # noqa: E731
    folder.mkdir(parents=True)
    with pytest.raises(DataError, match="holds no LEAF files"):
        make()
    write_leaf(folder, {"a": ([[0.0] * 784], [1, 2])})
    with pytest.raises(DataError, match="user 'a' has 1 inputs but 2 targets"):
        make()
    write_leaf(folder, {"a": ([[0.0] * 783], [1])})
    with pytest.raises(DataError, match="writer 'a' has images of 783 numbers"):
        make()
    write_leaf(folder, {"a": ([[0.0] * 784, [1.0]], [1, 1])})
    with pytest.raises(DataError, match="not 784 numbers"):
        make()
    write_leaf(folder, {"a": ([[0.0] * 784], [62])})
    with pytest.raises(DataError, match="label 62, but there are 62 classes"):
        make()
    write_leaf(folder, {"a": ([[0.0] * 784], [1.5])})
    with pytest.raises(DataError, match="labels of writer 'a' must be one whole number for each sample"):
        make()
    write_leaf(folder, {"a": ([[0.0] * 784], [1])})
    [path] = folder.glob("*.json")
    (folder / "more.json").write_text(path.read_text())
    with pytest.raises(DataError, match="user 'a' is listed twice in the files of"):
        make()
    (folder / "more.json").unlink()
    path.write_text(path.read_text()[:-50])
    with pytest.raises(DataError, match="truncated or not JSON"):
        make()
    path.write_text('{"users": ["a"]}')
    with pytest.raises(DataError, match="it has no user_data"):
        make()
    for content, sentence in (
        ('{"users": 3, "user_data": {}}', "its users are not a list"),
        ('{"users": [["a"]], "user_data": {"a": {}}}', "has no lists x and y"),
        ('{"user_data": {"a": {"x": 3, "y": [1]}}}', "user 'a' has no lists x and y"),
        ('{"user_data": {"a": {"x": [3], "y": null}}}', "user 'a' has no lists x and y"),
    ):
        path.write_text(content)
        with pytest.raises(DataError, match=sentence):
            make()


def speech(role: str, text: str) -> str:
    return json.dumps({"play": "hamlet", "title": "Hamlet", "role": role, "text": text})


def text_of(x: torch.Tensor) -> str:
    return "".join(ALPHABET[c] for c in x.tolist())


def test_shakespeare_is_leafs_construction(tmp_path: Path) -> None:
    lines = [speech("HAMLET", "To be,\nor  not\tto be?"), speech("GHOST", "Mark me."), speech("HAMLET", "I  will. €$")]
    (tmp_path / "shakespeare.jsonl").write_text("\n".join(lines) + "\n")
    source = sources.make("shakespeare", root=str(tmp_path), train=21, test=5)
    first, second = "To be, or not to be?\n", "I will.   \n"
    assert source.group_names == ("hamlet: HAMLET",)
    assert source.train.x.dtype == source.train.y.dtype == torch.int64
    for k in range(21):
        assert text_of(source.train.x[k]) == (" " * 80 + first)[k : k + 80]
        assert text_of(source.train.y[k : k + 1]) == first[k]
    assert [text_of(source.test.x[k]) for k in range(5)] == [(" " * 80 + second)[k : k + 80] for k in range(5)]
    assert text_of(source.test.y) == second[:5]
    assert source.train.classes == len(ALPHABET) == 80

    few = sources.make("shakespeare", root=str(tmp_path), train=3, test=10)  # the rest of the first speech is skipped
    assert text_of(few.test.y) == second[:10]
    everything = sources.make("shakespeare", root=str(tmp_path), train=None, test=None)
    assert text_of(everything.train.y) == "Mark me.\n" + first  # a role of one speech has nothing to test on
    assert text_of(everything.test.y) == second
    assert sources.make("shakespeare", root=str(tmp_path), train=None, test=None, least=20).group_names == (
        "hamlet: HAMLET",
    )
    random_split = sources.make("shakespeare", root=str(tmp_path), train=20, test=11, split="random")
    assert Counter(text_of(random_split.train.y) + text_of(random_split.test.y)) < Counter(first + second)
    with pytest.raises(DataError, match=r"no role of .* has 40 training and 400 test samples"):
        sources.make("shakespeare", root=str(tmp_path), train=40)
    with pytest.raises(ConfigError, match="did you mean 'random'"):
        sources.make("shakespeare", root=str(tmp_path), split="randon")
    (tmp_path / "shakespeare.jsonl").write_text(lines[0][:-5])
    with pytest.raises(DataError, match="truncated or does not hold one JSON object per line"):
        sources.make("shakespeare", root=str(tmp_path))
    (tmp_path / "shakespeare.jsonl").write_text('{"play": "hamlet", "text": "x"}\n')
    with pytest.raises(DataError, match="speech 1 has no play, role and text"):
        sources.make("shakespeare", root=str(tmp_path))


def test_shakespeare_as_leaf_has_written_it(tmp_path: Path) -> None:
    text = (
        "Now is the winter of our discontent made glorious summer by this sun of York; and all the clouds that lour'd"
    )
    windows = [(text[k : k + 80], text[k + 80]) for k in range(len(text) - 80)]
    for part, rows in (("train", windows[:20]), ("test", windows[20:])):
        role = {"RICHARD_III_GLOUCESTER": ([x for x, _ in rows], [y for _, y in rows]), "OTHER": ([], [])}
        write_leaf(tmp_path / "shakespeare/data" / part, role)
    source = sources.make("shakespeare", root=str(tmp_path), train=10, test=4)
    assert (len(source.train), len(source.test)) == (10, 4)
    assert text_of(source.train.x[3]) == text[3:83]
    assert text_of(source.test.y) == text[100:104]
    write_leaf(tmp_path / "shakespeare/data/train", {"A": (["short"], ["x"])})
    with pytest.raises(DataError, match="role 'A' has an input that is not 80 characters"):
        sources.make("shakespeare", root=str(tmp_path))


def chunks_of(comment: str) -> tuple[list, dict]:
    """LEAF's chunks of one comment."""
    words, after = ["<BOS>", *comment.split(), "<EOS>"], [*comment.split(), "<EOS>", "<PAD>"]
    fill = -len(words) % 10
    rows = [
        [w[k : k + 10] for k in range(0, len(words) + fill, 10)]
        for w in (words + ["<PAD>"] * fill, after + ["<PAD>"] * fill)
    ]
    counts = [1] * len(words) + [0] * fill
    meta = {"subreddit": "r", "created_utc": "1", "score": 1, "target_tokens": rows[1]}
    return rows[0], meta | {"count_tokens": [counts[k : k + 10] for k in range(0, len(counts), 10)]}


def test_reddit(tmp_path: Path) -> None:
    comments = ["the cat sat on the mat and the dog sat on the log today", "yes the cat did"]
    chunks = [chunks_of(comment) for comment in comments]
    user = ([x for x, _ in chunks], [y for _, y in chunks])
    write_leaf(tmp_path / "reddit/data/train", {"17": user, "3": user})
    write_leaf(tmp_path / "reddit/data/test", {"17": ([chunks[1][0]], [chunks[1][1]])})
    padded = sources.make("reddit", root=str(tmp_path), words=8, padded=True)
    assert padded.train.x.shape == padded.train.y.shape == (6, 10)
    assert padded.train.names[:3] == ("<PAD>", "<UNK>", "the")  # eight times; <BOS> and <EOS> four
    words = [padded.train.names[k] for k in padded.train.y[0]]
    assert words == ["the", "cat", "sat", "on", "the", "<UNK>", "<UNK>", "the", "<UNK>", "sat"]
    assert padded.train.y[:, :-1].equal(padded.train.x[:, 1:])

    source = sources.make("reddit", root=str(tmp_path), words=50, length=5)
    assert (source.train.x > 0).all()
    assert source.train.classes == 50
    text = [source.train.names[k] for k in source.train.x[:4].flatten()]
    assert text == ["<BOS>", *comments[0].split(), "<EOS>", "<BOS>", *comments[1].split()[:3]]
    assert source.train.y[:4].flatten()[:-1].equal(source.train.x[:4].flatten()[1:])
    federation = federate(source, "natural", held_out="natural")
    assert federation.names == ("user 17", "user 3")
    assert federation.held_out.index.sizes.tolist() == [1, 0]
    write_leaf(tmp_path / "reddit/data/train", {"17": ([["a raw comment"]], [{"subreddit": "r"}])})
    with pytest.raises(DataError, match="user '17' has comments that are not in LEAF's format"):
        sources.make("reddit", root=str(tmp_path))
    for chunk in (3, [*["a"] * 9, ["b"]]):
        write_leaf(tmp_path / "reddit/data/train", {"17": ([[chunk]], [{"target_tokens": [["a"] * 10]}])})
        with pytest.raises(DataError, match="chunks that are not 10 words with 10 targets"):
            sources.make("reddit", root=str(tmp_path))


def test_mqp_and_its_wordpiece(tmp_path: Path) -> None:
    home = tmp_path / "mqp"
    home.mkdir()
    pieces = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "is", "it", "##ch", "##ing", "bad", "?", ",", "cafe"]
    (home / "vocab.txt").write_text("\n".join(pieces) + "\n")
    rows = ['1,"Is itching bad?","Is it bad, café?",1', "1,Is it?,Bad?,0", "11,zzz,Is it bad?,0"]
    (home / "mqp.csv").write_text("\n".join(rows) + "\n")
    source = sources.make("mqp", root=str(tmp_path), length=18)
    assert source.train.x.dtype == torch.int64
    assert source.train.x[0].tolist() == [3, 5, 6, 7, 8, 9, 10, 4, 5, 6, 9, 11, 12, 10, 4, 0, 0, 0]
    assert source.train.x[2].tolist()[:8] == [3, 2, 4, 5, 6, 9, 10, 4]
    assert source.train.y.tolist() == [1, 0, 0]
    assert source.group_names == ("doctor 1", "doctor 11")
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    assert pair("is is is is", "it", vocabulary, 6) == [3, 5, 5, 4, 6, 4]
    (home / "mqp.csv").write_text(rows[0] + "\n2,only three,cells\n")
    with pytest.raises(DataError, match="line 2: there are 3 cells, not 4"):
        sources.make("mqp", root=str(tmp_path))
    (home / "mqp.csv").write_text("²,a,b,1\n")
    with pytest.raises(DataError, match="a row for doctor '²'"):
        sources.make("mqp", root=str(tmp_path))
    (home / "mqp.csv").write_text("1,a,b,2\n")
    with pytest.raises(DataError, match="label '2', not a number and 0 or 1"):
        sources.make("mqp", root=str(tmp_path))
    (home / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(DataError, match=r"lacks \[PAD\], \[UNK\]"):
        sources.make("mqp", root=str(tmp_path))


def write_wave(path: Path, sound: np.ndarray, rate: int = 16_000) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(sound.astype("<i2").tobytes())


def test_speech_commands(tmp_path: Path) -> None:
    home = tmp_path / "speech_commands_v0.02"
    sounds = {}
    for word in ("bed", "yes"):
        for k, speaker in enumerate(["0a2b", "0a2b", "77ff", "9c9c", "c0de"]):
            n = 16_000 if k else 9000
            sounds[f"{word}/{speaker}_nohash_{k}.wav"] = RNG.integers(-32_768, 32_767, n)
    for name, sound in sounds.items():
        write_wave(home / name, sound)
    write_wave(home / "_background_noise_" / "pink.wav", RNG.integers(-9, 9, 50_000))
    (home / "validation_list.txt").write_text("bed/9c9c_nohash_3.wav\nyes/9c9c_nohash_3.wav\n")
    (home / "testing_list.txt").write_text("bed/c0de_nohash_4.wav\nyes/c0de_nohash_4.wav\n")
    source = sources.make("speech_commands", root=str(tmp_path))
    assert source.train.x.shape == (6, 1, 16_000)
    assert source.train.names == ("bed", "yes")
    assert source.group_names == ("speaker 0a2b", "speaker 77ff", "speaker c0de")
    expected = torch.tensor(sounds["bed/0a2b_nohash_0.wav"]) / 32_768
    torch.testing.assert_close(source.train.x[0, 0, :9000], expected.float())
    assert not source.train.x[0, 0, 9000:].any()
    assert federate(source, "natural", held_out=0.0).train.index.sizes.tolist() == [4, 2]
    assert len(sources.make("speech_commands", root=str(tmp_path), validation=True).train) == 8
    only = sources.make("speech_commands", root=str(tmp_path), words=("yes",), rate=8000)
    assert only.train.x.shape == (3, 1, 8000)
    with pytest.raises(ConfigError, match="no word 'no'"):
        sources.make("speech_commands", root=str(tmp_path), words=("no",))


def test_half_the_rate_keeps_what_is_below_it(tmp_path: Path) -> None:
    home = tmp_path / "speech_commands_v0.02"
    time = np.arange(16_000) / 16_000
    write_wave(home / "on/a_nohash_0.wav", 10_000 * np.sin(2 * np.pi * 440 * time))
    write_wave(home / "on/b_nohash_0.wav", 10_000 * np.sin(2 * np.pi * 6000 * time))
    for name in ("validation_list.txt", "testing_list.txt"):
        (home / name).write_text("")
    x = sources.make("speech_commands", root=str(tmp_path), rate=8000).train.x[:, 0, 100:-100]
    low = torch.tensor(10_000 / 32_768 * np.sin(2 * np.pi * 440 * time[::2][100:-100]))
    assert (x[0] - low).abs().max() < 0.003
    assert x[1].abs().max() < 0.01


def test_bad_recordings_get_one_sentence(tmp_path: Path) -> None:
    home = tmp_path / "speech_commands_v0.02"
    make = lambda: sources.make("speech_commands", root=str(tmp_path))  # noqa: E731
    path = home / "on/a_nohash_0.wav"
    write_wave(path, np.zeros(16_000), rate=44_100)
    (home / "validation_list.txt").write_text("")
    with pytest.raises(DataError, match=r"expected speech_commands_v0.02/testing_list.txt in"):
        make()
    (home / "testing_list.txt").write_text("")
    with pytest.raises(DataError, match="1 channels of 16 bits at 44100 Hz"):
        make()
    write_wave(path, np.zeros(16_000))
    blob = path.read_bytes()
    for cut in (0, 20, 2000):
        path.write_bytes(blob[:cut])
        with pytest.raises(DataError, match=r"a_nohash_0.wav is truncated"):
            make()
    path.rename(home / "on/a.wav")
    with pytest.raises(DataError, match="does not name its speaker"):
        make()
    assert not list(home.glob("*fedloom*"))
