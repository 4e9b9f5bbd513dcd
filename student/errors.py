"""Errors of training, evaluating and exporting that a user can act on.

Each message says what was expected, what was found and what to do next; the
command prints it without a traceback.
"""


class StudentError(ValueError):
    """Training, evaluating or exporting cannot go on as asked."""


class ObjectiveError(StudentError):
    """The cache cannot serve what the objective asks for."""


class RunError(StudentError):
    """The run folder is in use, damaged, or of another run than is asked for."""


class TrainingError(StudentError):
    """Training itself failed: a loss that is not finite, a batch that cannot be read."""
