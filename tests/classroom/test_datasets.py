import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from course_lib.classroom import datasets
from course_lib.classroom.datasets import (
    ALPHABET,
    CORPUS_LENGTH,
    DATA_DIR,
    Alphabet,
    DatasetError,
    cache_dir,
    data_file,
    digits,
    text_batches,
    text_corpus,
)


@pytest.fixture
def data_copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA_DIR, tmp_path / "data"))


# --- digits


def test_the_digits_are_the_uci_test_part():
    (images, labels), (test_images, test_labels) = digits("train"), digits("test")
    assert images.shape == (1437, 64) and test_images.shape == (360, 64)
    assert images.dtype == torch.float32 and labels.dtype == torch.int64
    every = torch.cat([images, test_images])
    assert every.min() == 0 and every.max() == 1 and torch.equal(every * 16, (every * 16).round())
    # the class counts the source publishes for its test part
    counts = torch.bincount(torch.cat([labels, test_labels])).tolist()
    assert counts == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert (images[0] * 16).int().tolist()[:8] == [0, 0, 5, 13, 9, 1, 0, 0] and labels[:10].tolist() == list(
        range(10)
    )


def test_digits_as_images_are_the_same_pixels():
    flat, _ = digits("test")
    images, _ = digits("test", flat=False)
    assert images.shape == (360, 1, 8, 8)
    assert torch.equal(images.flatten(1), flat)


def test_a_class_mean_recognises_four_test_digits_of_five():
    # labels belong to their images: chance would be one in ten
    (images, labels), (test_images, test_labels) = digits("train"), digits("test")
    means = torch.stack([images[labels == digit].mean(0) for digit in range(10)])
    found = torch.cdist(test_images, means).argmin(1)
    assert (found == test_labels).float().mean() > 0.8


def test_a_wrong_split_is_named():
    with pytest.raises(ValueError, match=r"split must be one of \['test', 'train'\], not 'valid'"):
        digits("valid")
    with pytest.raises(ValueError, match=r"\['all', 'train', 'valid'\], not 'test'"):
        text_corpus("test")


def test_every_shipped_file_has_its_checksum():
    listed = {line.split()[1] for line in (DATA_DIR / "SHA256SUMS").read_text().splitlines()}
    assert {path.name for path in DATA_DIR.glob("*.npz")} <= listed
    for name in listed:
        assert data_file(name) == DATA_DIR / name


def test_one_flipped_bit_is_found(data_copy: Path):
    path = data_copy / "digits.npz"
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(
        DatasetError, match=r"digits\.npz is damaged: its SHA-256 is .*expected .*git checkout"
    ):
        digits(directory=data_copy)


def test_a_cut_file_is_found(data_copy: Path):
    os.truncate(data_copy / "digits.npz", 1000)
    with pytest.raises(DatasetError, match="damaged"):
        digits(directory=data_copy)


@pytest.mark.parametrize("name", ["digits.npz", "SHA256SUMS"])
def test_a_missing_file_is_named(data_copy: Path, name: str):
    (data_copy / name).unlink()
    with pytest.raises(DatasetError, match=rf"{name} is missing.*git checkout.*make lab"):
        digits(directory=data_copy)


def test_a_file_without_checksum_is_refused(data_copy: Path):
    np.savez(data_copy / "other.npz", a=np.zeros(1))
    with pytest.raises(DatasetError, match=r"no line for other\.npz"):
        data_file("other.npz", data_copy)


# --- text


def test_the_corpus_is_plain_text_of_a_fixed_length(tmp_path: Path):
    text = text_corpus(cache=tmp_path)
    assert len(text) == CORPUS_LENGTH == 400_000
    assert set(text) <= set(ALPHABET.characters)
    assert '"for" statement' in text and text.count("\n") > 5000
    assert text.count("?") < 0.005 * len(text)  # what the alphabet lacks is rare
    assert text_corpus("train", cache=tmp_path) + text_corpus("valid", cache=tmp_path) == text
    assert len(text_corpus("valid", cache=tmp_path)) == 40_000


def test_the_corpus_is_read_from_its_cache(tmp_path: Path, monkeypatch):
    text = text_corpus(cache=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [
        f"python-documentation-{platform.python_version()}.txt"
    ]
    monkeypatch.setattr(datasets, "_build_corpus", lambda: pytest.fail("built again"))
    assert text_corpus(cache=tmp_path) == text


@pytest.mark.parametrize("damage", ["cut", "changed", "not text", "empty"])
def test_a_damaged_cache_is_built_again(tmp_path: Path, damage: str):
    text = text_corpus(cache=tmp_path)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    bad = {"cut": content[:-1], "changed": content[:-1] + b"#", "not text": b"\xff" * 9, "empty": b""}[damage]
    assert bad != content
    path.write_bytes(bad)
    assert text_corpus(cache=tmp_path) == text
    assert path.read_bytes() == content


def test_four_processes_build_the_corpus_at_once(tmp_path: Path):
    code = "from course_lib.classroom import datasets as d; import hashlib; t = d.text_corpus('train');" + (
        "print(hashlib.sha256(t.encode()).hexdigest())"
    )
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-W", "error", "-c", code]
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    outputs = [process.communicate(timeout=120)[0].strip() for process in running]
    assert outputs == [hashlib.sha256(text_corpus("train", cache=tmp_path / "own").encode()).hexdigest()] * 4
    assert len(list((tmp_path / "course_lib").iterdir())) == 1  # no draft is left


def test_an_unwritable_cache_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DatasetError, match=r"cannot be written to .*file.*XDG_CACHE_HOME"):
        text_corpus(cache=tmp_path / "file")


def test_the_cache_falls_back_to_the_temporary_folder(tmp_path: Path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(datasets.tempfile, "tempdir", str(tmp_path))
    with pytest.warns(UserWarning, match="cannot write to the cache .*file"):
        assert cache_dir().parent == tmp_path
    monkeypatch.setattr(datasets.tempfile, "gettempdir", lambda: str(tmp_path / "file"))
    with pytest.raises(DatasetError, match=r"no folder .* can be written.*Set XDG_CACHE_HOME"):
        cache_dir()


def test_without_a_home_nothing_is_written_to_the_working_directory(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(
        datasets.os.path, "expanduser", lambda path: path
    )  # as for a user id without an entry
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="not an absolute path"):
        cache_dir()
    assert not list(tmp_path.iterdir())


def test_a_python_without_documentation_is_told(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DatasetError, match=r"no documentation text \(pydoc_data.topics\)"):
        text_corpus(cache=tmp_path)


def test_the_alphabet():
    assert len(ALPHABET) == 96
    text = "for i in range(3):\n    print(i)"
    tokens = ALPHABET.encode(text)
    assert tokens.dtype == torch.int64 and tokens.shape == (len(text),) and ALPHABET.decode(tokens) == text
    assert Alphabet("abcdefg").encode("gab").tolist() == [6, 0, 1]
    with pytest.raises(ValueError, match=r"not in the alphabet of 96 characters: \['é'\]"):
        ALPHABET.encode("café")
    with pytest.raises(ValueError, match="distinct"):
        Alphabet("aa")


def test_batches_are_next_characters_and_follow_from_the_seed(tmp_path: Path):
    def batches(seed: int):
        return list(text_batches(batch_size=5, length=57, num_batches=3, seed=seed, cache=tmp_path))

    for inputs, targets in batches(0):
        assert inputs.shape == targets.shape == (5, 57) and inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert ALPHABET.decode(inputs[0]) in text_corpus("train", cache=tmp_path)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(batches(0), batches(0), strict=True))
    assert not torch.equal(batches(0)[0][0], batches(1)[0][0])


def test_an_epoch_visits_every_window_once(tmp_path: Path):
    length, batch_size = 1000, 32
    epoch = list(text_batches(batch_size=batch_size, length=length, cache=tmp_path))
    assert len(epoch) == 359 // batch_size == 11  # 360 000 characters hold 359 windows with their last target
    rows = torch.cat([inputs for inputs, _ in epoch])
    assert len(torch.unique(rows, dim=0)) == 11 * batch_size
    two = list(text_batches(batch_size=batch_size, length=length, num_batches=22, cache=tmp_path))
    assert torch.equal(two[0][0], epoch[0][0]) and not torch.equal(two[11][0], epoch[0][0])


def test_valid_batches_follow_the_text(tmp_path: Path):
    inputs, _ = next(text_batches("valid", batch_size=2, length=30, seed=9, cache=tmp_path))
    assert ALPHABET.decode(inputs.flatten()) == text_corpus("valid", cache=tmp_path)[:60]


def test_too_large_a_batch_is_told(tmp_path: Path):
    with pytest.raises(
        ValueError, match=r"'valid' text has 39 windows of length 1000, fewer than batch_size 64"
    ):
        next(text_batches("valid", batch_size=64, length=1000, cache=tmp_path))
