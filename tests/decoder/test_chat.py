"""Conversations of each family: one BOS, the right end of turn, the assistant's tokens."""

import re
import subprocess
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from decoder.chat import (
    EndOfTurn,
    encode_chat,
    encode_turns,
    end_of_turn,
    render_chat,
)
from decoder.errors import DecoderError
from decoder.tokenizer import (
    Tokenizer,
    load_tokenizer,
    tokenizer_from_files,
)
from tests.decoder.chat_families import CHATML, CONVERSATION, FAMILIES, Family, conversation
from tests.models import smollm2_path

EACH = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
BY_NAME = {family.name: family for family in FAMILIES}


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def with_template(template: str, family: str = "smollm2", **settings: Any) -> Tokenizer:
    return BY_NAME[family].tokenizer(chat_template=template, **settings)


def without_spaces(text: str) -> str:
    return re.sub(r"\s+", "", text)


@EACH
def test_one_bos_where_the_template_writes_it(family: Family) -> None:
    """C24. The post-processors of five families would add another one."""
    tokenizer = family.tokenizer()
    ids = encode_chat(tokenizer, conversation(family))
    np.testing.assert_array_equal(
        ids, tokenizer.encode(render_chat(tokenizer, conversation(family)))
    )
    assert ids.dtype == np.uint32
    bos = tokenizer.bos_id
    if bos is None or family.name == "phi3":  # its template writes no BOS and its settings add none
        assert bos not in ids[:1].tolist()
        return
    assert ids[0] == bos
    assert (bos, bos) not in pairwise(ids.tolist())
    if family.adds_bos:
        twice = tokenizer.backend.encode(render_chat(tokenizer, conversation(family)))
        assert twice.ids[:2] == [bos, bos], "the text, tokenised with special tokens on, has two"


@pytest.mark.parametrize("adds", [True, False])
def test_bos_that_the_template_does_not_write(adds: bool) -> None:
    """C24: with BOS on exactly one, with BOS off none."""
    for name in ("llama3", "gemma"):
        template = BY_NAME[name].template.replace("{{ bos_token }}", "")
        silent = with_template(template, name, adds_bos=adds)
        writes = BY_NAME[name].tokenizer(adds_bos=adds)
        messages = CONVERSATION[1:]
        ids = encode_chat(silent, messages)
        whole = encode_chat(writes, messages)
        np.testing.assert_array_equal(ids, whole if adds else whole[1:])
        assert ids.tolist().count(silent.bos_id) == adds
        turns, mask = encode_turns(silent, messages)
        np.testing.assert_array_equal(turns, ids)
        np.testing.assert_array_equal(mask[int(adds) :], encode_turns(writes, messages)[1][1:])
        assert not mask[0]


def test_two_bos_are_refused() -> None:
    twice = with_template("{{ bos_token }}" + BY_NAME["gemma"].template, "gemma")
    for encode in (encode_chat, encode_turns):
        with pytest.raises(DecoderError, match=r"begins with two BOS tokens \('<bos>'\)"):
            encode(twice, [user("a"), assistant("b")])


@EACH
def test_end_of_turn(family: Family) -> None:
    tokenizer = family.tokenizer()
    found = end_of_turn(tokenizer)
    assert found == EndOfTurn(family.end, tokenizer.backend.token_to_id(family.end))
    assert (found.token == tokenizer.eos) == (
        family.name not in ("llama3", "gemma", "gemma3", "phi3")
    )


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant:{% endif %}",
            r"comes '\\n', in which no token is special",
        ),
        (
            "{% for m in messages %}{{ m.content | upper }}<|im_end|>{% endfor %}",
            "does not write the assistant's text as it is",
        ),
        # Only where the conversation stops: no sign that this turn is over.
        (
            "{% for m in messages %}{{ m.content }}\n{% endfor %}"
            "{% if not add_generation_prompt %}<|im_end|>{% endif %}",
            "no token is special",
        ),
    ],
)
def test_no_end_of_turn(template: str, reason: str) -> None:
    found = end_of_turn(with_template(template))
    assert (found.token, found.token_id) == (None, None)
    assert re.search(reason, found.reason)


def test_an_end_of_turn_is_no_white_space() -> None:
    """Gemma's tokenizer has added tokens of line breaks."""
    template = "{% for m in messages %}{{ m.content }}\n\n<end_of_turn>{% endfor %}"
    assert end_of_turn(with_template(template, "gemma3")).token == "<end_of_turn>"


def test_an_end_of_turn_is_whole() -> None:
    for wrong in [("a", None, ""), (None, None, ""), ("a", 1, "why")]:
        with pytest.raises(ValueError, match="a token and its id, or a reason"):
            EndOfTurn(*wrong)


@EACH
def test_the_assistants_tokens(family: Family) -> None:
    tokenizer, messages = family.tokenizer(), conversation(family)
    if family.turns is None:
        with pytest.raises(DecoderError, match="message 3 of 5: the text up to the end of the"):
            encode_turns(tokenizer, messages)
        return
    ids, mask = encode_turns(tokenizer, messages)
    assert mask.dtype == np.bool_
    np.testing.assert_array_equal(ids, encode_chat(tokenizer, messages))
    turns = [run for value, run in runs(mask, ids) if value]
    assert len(turns) == 2
    for turn, text in zip(turns, family.turns, strict=True):
        found = tokenizer.decode(turn)
        # A SentencePiece tokenizer puts a space of its own before what follows a special token.
        assert (
            (found == text)
            if family.words == "bytes"
            else (without_spaces(found) == without_spaces(text))
        )
        assert tokenizer.backend.id_to_token(int(turn[-1])) == family.end
        assert turn.tolist().count(turn[-1]) == 1
    # The assistant's ids are those that a model would write after the generation prompt.
    prompt = encode_chat(tokenizer, messages[:-1], add_generation_prompt=True)
    first = int(np.flatnonzero(mask)[-len(turns[1])])
    np.testing.assert_array_equal(ids[:first], prompt)


def runs(mask: np.ndarray, ids: np.ndarray) -> list[tuple[bool, np.ndarray]]:
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    return [(bool(mask[a]), ids[a:b]) for a, b in pairwise(borders)]


def test_thoughts() -> None:
    """Qwen 3's format up to each turn: the last turn is all that the model has to write."""
    tokenizer = BY_NAME["qwen3"].tokenizer()
    thought = "<think>\nIt is late.\n</think>\n\nThe rest."
    for messages, expected in [
        (CONVERSATION[:3], "<think>\n\n</think>\n\nRows of tokens, é 语.<|im_end|>"),
        ([user("Hi"), assistant(thought)], thought + "<|im_end|>"),
        ([user("Hi"), assistant("a"), user("b")], None),
    ]:
        if expected is None:
            with pytest.raises(DecoderError, match="as one of its own"):
                encode_turns(tokenizer, messages)
            continue
        ids, mask = encode_turns(tokenizer, messages)
        assert tokenizer.decode(ids[mask]) == expected
    # Of turns behind one question every thought stays.
    both = [user("Hi"), assistant(thought), assistant(thought)]
    ids, mask = encode_turns(tokenizer, both)
    assert tokenizer.decode(ids[mask]) == 2 * (thought + "<|im_end|>")


def test_tokens_across_the_borders_of_a_turn() -> None:
    """A header's line break merged with the turn's own is the header's; offsets are not trimmed."""
    family = BY_NAME["gemma3"]  # "\n\n" is a token
    tokenizer = family.tokenizer()
    template = family.template.replace("message.content | trim", "message.content")
    keeps = with_template(template, "gemma3")
    ids, mask = encode_turns(keeps, [user("a"), assistant("\nb")])
    assert keeps.decode(ids[mask]) == "b<end_of_turn>"
    assert keeps.decode(ids).endswith("model\n\nb<end_of_turn>\n")
    ids, mask = encode_turns(tokenizer, [user("a"), assistant("")])
    assert keeps.decode(ids[mask]) == "<end_of_turn>"
    chatml = BY_NAME["smollm2"].tokenizer()
    ids, mask = encode_turns(chatml, [user("a"), assistant("  b\n ")])
    assert chatml.decode(ids[mask]) == "  b\n <|im_end|>"
    # A header's last space in one token with the turn's first word: its offset is not trimmed.
    spaced = with_template(CHATML.replace("\n{{", ": {{").replace("assistant\n", "assistant: "))
    ids, mask = encode_turns(spaced, [user("a"), assistant("the the")])
    assert spaced.decode(ids[mask]) == " the<|im_end|>"
    place = int(np.flatnonzero(mask)[0]) - 1
    trimmed = spaced.backend.encode(spaced.decode(ids), add_special_tokens=False)
    assert spaced.decode([ids[place]]) == " the"
    assert trimmed.offsets[place][0] == len(spaced.decode(ids[:place])) + 1


def test_conversations_without_the_assistant_or_begun_by_it() -> None:
    tokenizer = BY_NAME["smollm2"].tokenizer()
    ids, mask = encode_turns(tokenizer, [user("a")])
    assert mask.shape == ids.shape
    assert not mask.any()
    with pytest.raises(DecoderError, match="message 1 of 2 is the assistant's: no message stands"):
        encode_turns(tokenizer, [assistant("a"), user("b")])


def test_a_template_that_ends_some_turns_otherwise() -> None:
    skips = CHATML.replace("<|im_end|>", "{% if message.content != 'b' %}<|im_end|>{% endif %}")
    with pytest.raises(DecoderError, match=r"message 2 of 2: .* ends other turns .*, and not this"):
        encode_turns(with_template(skips), [user("a"), assistant("b")])


def test_a_generation_prompt_that_the_template_does_not_write_itself() -> None:
    thinks = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    with pytest.raises(DecoderError, match="message 2 of 2: the generation prompt before the"):
        encode_turns(with_template(thinks), [user("a"), assistant("b")])


GENERATION = CHATML.replace(
    "{{ message['content'] }}<|im_end|>\n",
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] }}<|im_end|>{{ '\n' }}{% endif %}",
)


def test_generation_blocks() -> None:
    """They say the same as the renderings, also where a conversation begins with the assistant."""
    plain, blocks = with_template(CHATML), with_template(GENERATION)
    assert render_chat(blocks, CONVERSATION) == render_chat(plain, CONVERSATION)
    for one, other in zip(
        encode_turns(blocks, CONVERSATION), encode_turns(plain, CONVERSATION), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    # The characters that mark the blocks may stand in the conversation.
    odd = [assistant("\ue000a\ue001"), user("\ue002"), assistant("b")]
    ids, mask = encode_turns(blocks, odd)
    assert blocks.decode(ids[mask]) == "\ue000a\ue001<|im_end|>b<|im_end|>"
    only_text = with_template(GENERATION.replace("<|im_end|>{% endg", "{% endg"))
    ids, mask = encode_turns(only_text, CONVERSATION)
    assert "<|im_end|>" not in only_text.decode(ids[mask])


def test_generation_blocks_that_are_computed_with() -> None:
    measured = (
        "{% set text %}{% generation %}{{ messages[-1].content }}{% endgeneration %}{% endset %}"
        "{{ text }}{{ text | length }}"
    )
    with pytest.raises(DecoderError, match="computes with the text of its generation blocks"):
        encode_turns(with_template(measured), [user("a"), assistant("b")])


@pytest.mark.parametrize(
    "template",
    [
        CHATML.partition("{% if add_gen")[0],
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}",
        "{% for m in messages %}{{ m.role }}: {{ m.content | upper }}<|im_end|>{% endfor %}",
    ],
)
def test_a_template_without_generation_prompt(template: str) -> None:
    """Its header of the assistant's turn would be taken for the assistant's."""
    ignores = with_template(template)
    messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    with pytest.raises(DecoderError, match="this chat template ignores add_generation_prompt, and"):
        encode_turns(ignores, messages)
    ids, mask = encode_turns(ignores, [user("a")])
    assert not mask.any()
    assert encode_chat(ignores, messages).size > ids.size
    # Without a header there is nothing to take for the assistant's.
    bare = with_template("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    ids, mask = encode_turns(bare, messages)
    assert bare.decode(ids[mask]) == "b<|im_end|>d<|im_end|>"


def test_a_tokenizer_without_template() -> None:
    tokenizer = BY_NAME["smollm2"].tokenizer(chat_template=None)
    for call in (
        lambda: encode_chat(tokenizer, CONVERSATION),
        lambda: encode_turns(tokenizer, CONVERSATION),
        lambda: end_of_turn(tokenizer),
    ):
        with pytest.raises(DecoderError, match="the tokenizer has no chat template"):
            call()


def test_settings_of_a_conversation_change_the_fingerprint() -> None:
    """C33: template, BOS setting and special tokens are part of what a cache was made with."""
    family = BY_NAME["llama3"]
    prints = {
        family.tokenizer(**settings).fingerprint
        for settings in (
            {},
            {"chat_template": family.template + " "},
            {"adds_bos": False},
            {"eos": "<|eot_id|>"},
        )
    }
    assert len(prints) == 4
    again = tokenizer_from_files(family.tokenizer().files())
    assert again.fingerprint == family.tokenizer().fingerprint
    np.testing.assert_array_equal(
        encode_chat(again, CONVERSATION), encode_chat(family.tokenizer(), CONVERSATION)
    )


def test_smollm2s_own_template() -> None:
    """The file's template, which begins a conversation without system message with one."""
    tokenizer = load_tokenizer(str(smollm2_path()))
    assert end_of_turn(tokenizer) == EndOfTurn("<|im_end|>", 2)
    ids, mask = encode_turns(tokenizer, CONVERSATION)
    assert ids[:2].tolist() == [tokenizer.bos_id, *tokenizer.encode("system")]
    assert tokenizer.decode(ids[mask]) == "".join(BY_NAME["smollm2"].turns or ())
    assert tokenizer.decode(ids) == render_chat(with_template(CHATML), CONVERSATION)
    no_system, again = encode_turns(tokenizer, CONVERSATION[1:])
    assert tokenizer.decode(no_system).startswith("<|im_start|>system\nYou are a helpful AI")
    np.testing.assert_array_equal(no_system[again], ids[mask])


def test_jax_is_not_imported() -> None:
    code = (
        "import sys; from decoder import encode_chat, encode_turns, end_of_turn, render_chat\n"
        "assert not {'jax', 'cache', 'pipelines', 'student'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
