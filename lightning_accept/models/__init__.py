"""The models of the paper, as ordinary LightningModules: nothing in them knows of workers."""

from lightning_accept.models.activity import ActivityClassifier, activity_cnn
from lightning_accept.models.classifier import Classifier
from lightning_accept.models.mobilenet import MobileNetV2Classifier, small_mobilenet_v2

__all__ = ["ActivityClassifier", "Classifier", "MobileNetV2Classifier", "activity_cnn", "small_mobilenet_v2"]
