"""Errors of a capture that a user can act on.

Each message says what was expected, what was found and what to do next; the
command prints it without a traceback.
"""


class PipelineError(ValueError):
    """A capture cannot go on as asked."""


class CorpusError(PipelineError):
    """The corpus cannot be read, or holds something that is no document."""


class TeacherError(PipelineError):
    """The teacher cannot be loaded, or does not fit the corpus or the settings."""


class CaptureError(PipelineError):
    """The capture itself failed, or does not match what is already stored."""
