"""Data by name, for the command line: users' files, what scikit-learn ships, and public sets."""

from bayesify.data.digits import split_digits
from bayesify.data.names import BUILT_IN, load_data, load_inputs
from bayesify.data.public import CIFAR10_NORMALISATION
from bayesify.data.readable import Readable, readable
from bayesify.data.sets import VOID, ImageFiles, Images, Normalisation, Standardised, Texts

__all__ = [
    "BUILT_IN",
    "CIFAR10_NORMALISATION",
    "VOID",
    "ImageFiles",
    "Images",
    "Normalisation",
    "Readable",
    "Standardised",
    "Texts",
    "load_data",
    "load_inputs",
    "readable",
    "split_digits",
]
