"""The exceptions that this package raises for what a user can put right."""


class DecoderError(ValueError):
    """A model, checkpoint, tokenizer or source that cannot be used as given.

    The text says what was expected, what was found and what to do next.
    """


class BackendError(DecoderError):
    """JAX cannot open the devices that it is asked for; no matter of any model."""
