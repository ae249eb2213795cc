"""Continual classifier, and the values it returns."""

from probprompt.classifier.continual import ContinualClassifier, changing
from probprompt.classifier.evaluate import AccuracyMatrix
from probprompt.classifier.outputs import ConfusionRisk, Evaluation, LearnReport, Prediction, TaskScore, Version

__all__ = [
    "AccuracyMatrix",
    "ConfusionRisk",
    "ContinualClassifier",
    "Evaluation",
    "LearnReport",
    "Prediction",
    "TaskScore",
    "Version",
    "changing",
]
