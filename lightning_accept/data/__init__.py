"""The data sets of the paper, as LightningDataModules."""

from lightning_accept.data.cifar10 import CIFAR10DataModule
from lightning_accept.data.errors import DataNotFoundError
from lightning_accept.data.mnist import MNISTDataModule
from lightning_accept.data.uci_har import UCIHARDataModule

__all__ = ["CIFAR10DataModule", "DataNotFoundError", "MNISTDataModule", "UCIHARDataModule"]
