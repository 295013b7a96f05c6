"""The arguments and options that commands have in common."""

from pathlib import Path
from typing import Annotated

import typer

MODELS = (
    "A network: digits, cifar10-resnet20, cifar10-resnet56; or one of yours: path/to/file.py:build "
    "or package.module:build, where build() returns it."
)
DATA = (
    "Data: file.npz (arrays x and y), file.npz:train (x_train and y_train), file.csv (numbers, the "
    "target's column headed y), a folder of images with one folder a class, or a name such as "
    "digits:test. May end in a slice: digits:test[:100]."
)
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODELS)]
Data = Annotated[str, typer.Argument(metavar="DATA", help=DATA)]
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="What `bayesify fit` wrote.")]
Weights = Annotated[
    Path | None,
    typer.Option(help="The network's weights, .safetensors. Built-in networks have their own."),
]
MethodName = Annotated[
    str,
    typer.Option(
        "--method",
        help="What becomes random: abnn, bayes-adapter, ibnn, mixture; or a baseline: map, "
        "temperature, mc-dropout, deep-ensemble, swag, laplace, test-time-augmentation, "
        "mean-field-vi.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="A setting of the method: --set members=4. Repeatable."
    ),
]
Where = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GLOB",
        help="Only sites whose name matches: 'layer3.*'. Repeatable. Where there is data, auto: "
        "the fewest late layers that do as well on held-out data as any.",
    ),
]
Last = Annotated[int | None, typer.Option(metavar="K", help="Only the last K sites.")]
Validation = Annotated[
    str | None,
    typer.Option(metavar="DATA", help="Decides what is kept; split off the data otherwise."),
]
Calibration = Annotated[
    str | None,
    typer.Option(metavar="DATA", help="Chooses noise and temperature. Data not yet used."),
]
OtherData = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[NAME=]DATA",
        help="Data of another kind, which doubt should tell apart. Repeatable.",
    ),
]
Likelihood = Annotated[str, typer.Option(help="classification, binary, multilabel or regression.")]
Epochs = Annotated[
    int | None,
    typer.Option(min=1, help="Passes over the data; by default the method's own number."),
]
Augment = Annotated[str | None, typer.Option(help="crop-flip or strong; images only.")]
Progress = Annotated[bool, typer.Option(help="Show progress.")]
Normalise = Annotated[
    str | None,
    typer.Option(
        metavar="MEAN;STD",
        help="How the network's images were normalised; built-in networks have their own. "
        "cifar10, or mean and standard deviation of "
        "each channel in units of 0 to 1, as in '0.5,0.5,0.5;0.2,0.2,0.2'.",
    ),
]
Size = Annotated[
    int | None, typer.Option(metavar="PIXELS", help="Cut and resize the images of a folder.")
]
BatchSize = Annotated[int, typer.Option(min=1, help="Examples at a time.")]
Draws = Annotated[int | None, typer.Option(help="Draws of a prediction; as fitted by default.")]
Seed = Annotated[int, typer.Option(help="One seed, one result.")]
