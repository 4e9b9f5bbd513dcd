"""Functions that tests name as `tests.decoder.functions:…`, good ones and bad ones."""

import jax
import jax.numpy as jnp
from flax import nnx

VOCABULARY = 11

not_a_function = 3


class Table(nnx.Module):
    """Logits of the next token by the token alone: a bigram table."""

    max_positions = 99

    def __init__(self, shift: float = 0.0) -> None:
        values = jnp.arange(VOCABULARY * VOCABULARY, dtype=jnp.float32).reshape(VOCABULARY, -1)
        self.table = nnx.Param(jnp.sin(values) + shift)

    def __call__(self, tokens, segments, positions):
        return self.table[...][tokens]


class Hidden(Table):
    """The same table as an embedding, with an unembedding of its own."""

    def __call__(self, tokens, segments, positions):
        return self.table[...][tokens][:, :4]

    def unembed(self, hidden):
        return hidden @ self.table[...][:4, :7]


class WithKeys(Table):
    """State that is no parameter: random keys and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.rngs = nnx.Rngs(0)


class Batched(Table):
    def __call__(self, tokens, segments, positions):
        return self.table[...][tokens][None]


class Integers(Table):
    def __call__(self, tokens, segments, positions):
        return tokens[:, None]


class Raises(Table):
    def __call__(self, tokens, segments, positions):
        raise ValueError("needs a batch axis")


class TwoArguments(Table):
    def __call__(self, tokens, segments):
        return self.table[...][tokens]


class Several(Table):
    def __call__(self, tokens, segments, positions):
        return {"logits": self.table[...][tokens]}


def shifted() -> Table:
    return Table(1.0)


def no_module() -> jax.Array:
    return jnp.zeros(3)


class Modes(Table):
    """A dropout and a batch norm, which the flags `deterministic` and so on may turn off.

    `how` is the way in which they are called: directly, or within a transform.
    """

    def __init__(self, how: str = "directly", **call: bool) -> None:
        super().__init__()
        self.norm = nnx.BatchNorm(VOCABULARY, rngs=nnx.Rngs(0))
        self.norm.mean[...] = jnp.linspace(-1, 1, VOCABULARY)
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))
        self.how, self.training, self.call = how, True, nnx.data(call)

    def tail(self, hidden):
        norm = {k: v for k, v in self.call.items() if k == "use_running_average"}
        drop = {k: v for k, v in self.call.items() if k == "deterministic"}
        return self.dropout(self.norm(hidden, **norm), **drop)

    def __call__(self, tokens, segments, positions):
        hidden = super().__call__(tokens, segments, positions)
        lift = {"jit": nnx.jit, "remat": nnx.remat, "directly": lambda function: function}
        return lift[self.how](lambda model, hidden: model.tail(hidden))(self, hidden)


class DropsInJit(Modes):
    def __init__(self) -> None:
        super().__init__("jit", deterministic=False)


class DropsDirectly(Modes):
    def __init__(self) -> None:
        super().__init__(deterministic=False)


class NormalisesDirectly(Modes):
    def __init__(self) -> None:
        super().__init__(use_running_average=False)


class NormalisesInRemat(Modes):
    def __init__(self) -> None:
        super().__init__("remat", use_running_average=False)


class OwnFlag(Table):
    """A flag that `eval` does not know, and a key that is no state."""

    training = True

    def __call__(self, tokens, segments, positions):
        hidden = super().__call__(tokens, segments, positions)
        if not self.training:
            return hidden
        kept = jax.random.bernoulli(jax.random.key(0), 0.5, hidden.shape)
        return jnp.where(kept, 2 * hidden, 0.0)


class DropsInUnembed(Hidden):
    def __init__(self) -> None:
        super().__init__()
        self.key = nnx.Rngs(0)

    def unembed(self, hidden):
        return super().unembed(hidden) * self.key.uniform((7,))[None]


class OwnEval(OwnFlag):
    """Its own way into evaluation mode."""

    def eval(self, **attributes):
        self.training = False


def modes_off() -> Modes:
    model = Modes()
    model.eval()
    return model


def modes_in_jit() -> Modes:
    return Modes("jit")


def modes_in_remat() -> Modes:
    return Modes("remat")
