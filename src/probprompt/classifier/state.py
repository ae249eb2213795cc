"""Everything a classifier knows at one time. A state never changes: learning makes another one beside it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from probprompt.classifier.answers import Version
from probprompt.classifier.calibration import Calibration
from probprompt.classifier.novelty import Scale
from probprompt.classifier.sums import Part

Find = Callable[[str], Part]
"""A part by the name that it is kept under."""


@dataclass(frozen=True)
class KnownClass:
    """A class, with what is kept of its images for later learning."""

    uid: int
    """Tells it apart from all classes that ever were, whatever they are called."""
    name: str
    task: int
    """Which task brought it."""
    images: int
    held: Part
    """``rows``: the features of the images that are held out (h, D); ``mirrors``: of their mirror images."""
    rest: Part
    """Of the other images: ``rows`` (n, D), or sums over them."""


@dataclass(frozen=True)
class LearnedTask:
    """One call of ``learn`` that brought new classes."""

    name: str
    version: int
    images: int


@dataclass(frozen=True)
class State:
    """What is known: classes, prompts, head, Gaussians, and what only further learning needs."""

    classes: tuple[KnownClass, ...] = ()
    tasks: tuple[LearnedTask, ...] = ()
    adapted: tuple[int, ...] = ()
    """The number of classes of each task in which prompts learned."""
    next_uid: int = 0
    method: Part | None = None
    """The method's tensors, with those of a backbone that learns."""
    head: Part | None = None
    gaussians: Part | None = None
    later: Part | None = None
    """What a learner needs beside them: a head that leads prompts, statistics for the refit, prototypes."""
    sums: Part | None = None
    """Sums over all images that are not held out; can be made again from the classes."""
    strength: float | None = None
    """Lambda of a ridge head, once it is chosen."""
    calibration: Calibration = field(default_factory=Calibration)
    scale: Scale = field(default_factory=Scale)
    held_out: tuple[float | None, ...] = ()
    """Accuracy in % on the held-out images of each task, under a head that has not seen them; None where unknown."""

    @property
    def names(self) -> tuple[str, ...]:
        """The classes by their names, in the order of the head's rows."""
        return tuple(known.name for known in self.classes)

    def read(self) -> None:
        """Read what prediction needs: then it is there, whatever becomes of the files."""
        for part in (self.method, self.head, self.gaussians):
            if part is not None:
                _ = part.tensors

    def to_json(self, keep: Callable[[Part], str]) -> dict[str, Any]:
        """Describe the state, its parts by the names that ``keep`` gives them."""
        whole = ("method", "head", "gaussians", "later", "sums")
        parts = {name: getattr(self, name) for name in whole}
        return {
            "classes": [
                {
                    "uid": known.uid,
                    "name": known.name,
                    "task": known.task,
                    "images": known.images,
                    "held": keep(known.held),
                    "rest": keep(known.rest),
                }
                for known in self.classes
            ],
            "tasks": [vars(task) for task in self.tasks],
            "adapted": list(self.adapted),
            "next_uid": self.next_uid,
            "parts": {name: keep(part) for name, part in parts.items() if part is not None and part.there},
            "strength": self.strength,
            "calibration": vars(self.calibration),
            "scale": vars(self.scale),
            "held_out": list(self.held_out),
        }

    @classmethod
    def from_json(cls, note: Mapping[str, Any], find: Find) -> "State":
        """What :meth:`to_json` gave; parts are read when they are needed."""
        classes = tuple(
            KnownClass(
                uid=int(known["uid"]),
                name=str(known["name"]),
                task=int(known["task"]),
                images=int(known["images"]),
                held=find(known["held"]),
                rest=find(known["rest"]),
            )
            for known in note["classes"]
        )
        return cls(
            classes=classes,
            tasks=tuple(LearnedTask(**task) for task in note["tasks"]),
            adapted=tuple(note["adapted"]),
            next_uid=note["next_uid"],
            strength=note["strength"],
            calibration=Calibration(**note["calibration"]),
            scale=Scale(**note["scale"]),
            held_out=tuple(note["held_out"]),
            **{name: find(digest) for name, digest in note["parts"].items()},
        )


@dataclass(frozen=True)
class Kept:
    """A version with its state."""

    version: Version
    state: State
    token: str
    """Tells this version apart from every other of that number."""
