"""Models by name: what loads, and what each mistake says."""

import struct
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bayesify.data import split_digits
from bayesify.errors import (
    CorruptFileError,
    DataError,
    SettingError,
    UnsupportedNetworkError,
    WrongNetworkError,
)
from bayesify.zoo import ASSETS, BUILT_IN, CifarResNet, DigitsNet, load_model, load_weights

USER_CODE = """
from torch import nn
from neighbour import WIDTH

def build():
    return nn.Linear(WIDTH, 2)

ready = nn.Linear(3, 2)

class Nets:
    build = staticmethod(build)

class OwnClass(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)

def fails():
    raise ZeroDivisionError("by design")

def needs(width):
    return nn.Linear(width, 2)

def wrong():
    return 7

text = "not a network"
"""


@pytest.fixture
def user_file(tmp_path):
    (tmp_path / "neighbour.py").write_text("WIDTH = 3\n")
    path = tmp_path / "my_model.py"
    path.write_text(USER_CODE)
    yield path
    sys.modules.pop("neighbour", None)


@pytest.fixture
def linear_weights(tmp_path):
    path = tmp_path / "w.safetensors"
    save_file({"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, path)
    return path


class TestSpec:
    @pytest.mark.parametrize("attribute", ["build", "ready", "Nets.build", "OwnClass"])
    def test_file(self, user_file, attribute):
        path_before = list(sys.path)
        model = load_model(f"{user_file}:{attribute}")
        assert isinstance(model, nn.Linear)
        assert not model.training
        assert sys.path == path_before

    def test_module(self):
        assert isinstance(load_model("bayesify.zoo:DigitsNet"), DigitsNet)

    def test_module_of_the_working_directory(self, tmp_path, monkeypatch):
        (tmp_path / "local_nets.py").write_text("from torch import nn\nnet = nn.Linear(1, 1)\n")
        monkeypatch.chdir(tmp_path)
        assert isinstance(load_model("local_nets:net"), nn.Linear)
        del sys.modules["local_nets"]

    def test_a_file_may_be_named_like_a_standard_module(self, tmp_path):
        import json

        path = tmp_path / "json.py"
        path.write_text("from torch import nn\nnet = nn.Linear(1, 1)\n")
        load_model(f"{path}:net")
        assert sys.modules["json"] is json

    @pytest.mark.parametrize("spec", ["resnet", "", ":", "file.py:", ":factory"])
    def test_unknown_name_lists_the_built_in_ones(self, spec):
        with pytest.raises(
            SettingError, match=r"Built in are cifar10-resnet20, .*, digits; for one"
        ):
            load_model(spec)

    def test_missing_file(self, tmp_path):
        with pytest.raises(SettingError, match=r"gone\.py: there is no such file"):
            load_model(f"{tmp_path}/gone.py:build")

    @pytest.mark.parametrize(
        ("code", "message"),
        [
            ("def (", "SyntaxError"),
            ("import no_such_package_anywhere", "No module named 'no_such_package_anywhere'"),
            ("raise SystemExit(3)", "SystemExit: 3"),
        ],
    )
    def test_file_that_cannot_be_imported(self, tmp_path, code, message):
        path = tmp_path / "broken_model.py"
        path.write_text(code)
        with pytest.raises(SettingError, match=f"could not be imported: .*{message}"):
            load_model(f"{path}:build")
        assert "bayesify_user_broken_model" not in sys.modules

    @pytest.mark.parametrize("name", ["no_such_package_anywhere", ".relative", "bayesify.no"])
    def test_missing_module(self, name):
        with pytest.raises(SettingError, match="could not be imported"):
            load_model(f"{name}:build")

    @pytest.mark.parametrize("attribute", ["bild", "Nets.bild", "text.bild"])
    def test_missing_attribute(self, user_file, attribute):
        with pytest.raises(SettingError, match="there is no 'bild'; there is"):
            load_model(f"{user_file}:{attribute}")

    @pytest.mark.parametrize(
        ("attribute", "message"),
        [
            ("fails", "raised ZeroDivisionError: by design"),
            ("needs", "raised TypeError: .*missing 1 required .*without arguments"),
        ],
    )
    def test_factory_that_raises(self, user_file, attribute, message):
        with pytest.raises(SettingError, match=message):
            load_model(f"{user_file}:{attribute}")

    @pytest.mark.parametrize(("attribute", "kind"), [("wrong", "int"), ("text", "str")])
    def test_no_network(self, user_file, attribute, kind):
        with pytest.raises(UnsupportedNetworkError, match=rf"gave a {kind}, not a torch\.nn"):
            load_model(f"{user_file}:{attribute}")


class TestWeights:
    def test_are_copied_into_the_network(self, user_file, linear_weights):
        model = load_model(f"{user_file}:build", weights=linear_weights)
        assert torch.equal(model.weight, torch.ones(2, 3))

    @pytest.mark.parametrize("name", ["net.pt", "net.pth", "pytorch_model.bin"])
    def test_pickle_is_never_read(self, tmp_path, name):
        (tmp_path / name).write_bytes(b"\x80\x04.")
        with pytest.raises(SettingError, match=r"(?s)runs whatever code.*save_file\(torch\.load"):
            load_weights(nn.Linear(3, 2), tmp_path / name)

    def test_missing_file(self, tmp_path):
        with pytest.raises(SettingError, match="there is no such file"):
            load_weights(nn.Linear(3, 2), tmp_path / "gone.safetensors")

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"\x01",
            b"not a checkpoint at all, but long enough",
            struct.pack("<Q", 2**62) + b"{}",
            struct.pack("<Q", 20 * 2**20) + b" " * (20 * 2**20),
            struct.pack("<Q", 8) + b"not json",
            struct.pack("<Q", 2) + b"[]",
        ],
    )
    def test_foreign_file(self, tmp_path, content):
        path = tmp_path / "bad.safetensors"
        path.write_bytes(content)
        with pytest.raises(CorruptFileError, match=r"bad\.safetensors is .*safetensors file"):
            load_weights(nn.Linear(3, 2), path)

    @pytest.mark.parametrize("keep", [4, 60, -1])
    def test_truncated_file(self, linear_weights, keep):
        linear_weights.write_bytes(linear_weights.read_bytes()[:keep])
        with pytest.raises(CorruptFileError, match="copy or convert it again"):
            load_weights(nn.Linear(3, 2), linear_weights)

    @pytest.mark.parametrize(
        ("model", "message"),
        [
            (nn.Sequential(nn.Linear(3, 2)), r"lacks 0\.weight, 0\.bias; it has unknown .*bias"),
            (nn.Linear(3, 2, bias=False), "has unknown bias"),
            (nn.Linear(4, 2), r"weight \(float32 \[2, 3\], the network has float32 \[2, 4\]\)"),
            (CifarResNet(3), r"lacks .* and \d+ more"),
        ],
    )
    def test_of_another_network(self, linear_weights, model, message):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(WrongNetworkError, match=message):
            load_weights(model, linear_weights)
        assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())

    def test_of_another_kind_of_number(self, tmp_path):
        save_file({"weight": torch.ones(2, 3, dtype=torch.int8)}, tmp_path / "w.safetensors")
        with pytest.raises(WrongNetworkError, match=r"another shape or kind of weight .int8"):
            load_weights(nn.Linear(3, 2, bias=False), tmp_path / "w.safetensors")

    def test_tied_tensors_are_needed_once(self, tmp_path):
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        model[1].weight = model[0].weight
        save_file({"1.weight": torch.eye(2)}, tmp_path / "w.safetensors")
        load_weights(model, tmp_path / "w.safetensors")
        assert torch.equal(model[0].weight, torch.eye(2))


class TestBuiltIn:
    def test_digits_is_small_and_good(self):
        model = load_model("digits")
        x, y = split_digits("test")
        with torch.no_grad():
            accuracy = (model(x).argmax(dim=1) == y).float().mean().item()
        assert 0.97 <= accuracy <= 0.995
        assert 10_000 <= sum(p.numel() for p in model.parameters()) <= 30_000
        assert (ASSETS / "digits.safetensors").stat().st_size < 150_000
        assert any(isinstance(module, nn.BatchNorm2d) for module in model.modules())

    @pytest.mark.parametrize(("blocks", "layers"), [(3, 20), (9, 56)])
    def test_cifar_resnet_has_the_layers_of_its_name(self, blocks, layers):
        model = CifarResNet(blocks)
        weighted = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Conv2d | nn.Linear) and "downsample" not in name
        ]
        assert len(weighted) == layers
        assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)

    @pytest.mark.parametrize("name", sorted(set(BUILT_IN) - {"digits"}))
    @pytest.mark.parametrize("folder", [None, "empty"])
    def test_missing_checkpoint(self, name, folder, tmp_path, monkeypatch):
        monkeypatch.delenv("BAYESIFY_DATA", raising=False)
        if folder:
            monkeypatch.setenv("BAYESIFY_DATA", str(tmp_path))
        file = name.replace("-", "_")
        with pytest.raises(DataError, match=rf"{file}\.safetensors is missing .*pytorch-cifar"):
            load_model(name)

    def test_own_weights_replace_the_public_ones(self, tmp_path, monkeypatch):
        monkeypatch.delenv("BAYESIFY_DATA", raising=False)
        theirs = CifarResNet(3)
        save_file(theirs.state_dict(), tmp_path / "own.safetensors")
        ours = load_model("cifar10-resnet20", weights=str(tmp_path / "own.safetensors"))
        assert torch.equal(ours.fc.weight, theirs.fc.weight)
