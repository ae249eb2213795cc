"""The classifier that people use, and the values it returns."""

from probprompt.classifier.answers import Evaluation, LearnReport, Prediction, Risk, TaskScore, Version
from probprompt.classifier.continual import ContinualClassifier, changing
from probprompt.classifier.insight import AccuracyMatrix

__all__ = [
    "AccuracyMatrix",
    "ContinualClassifier",
    "Evaluation",
    "LearnReport",
    "Prediction",
    "Risk",
    "TaskScore",
    "Version",
    "changing",
]
