"""The 256 stand-ins of byte-level vocabularies."""

import tokenizers

from decoder.byte_level import BYTES, SYMBOLS, symbol_text


def test_symbols_are_those_of_the_library() -> None:
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    assert set(SYMBOLS.values()) == set(alphabet)
    assert len(BYTES) == 256
    splitter = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in ("\x00\x1f !~\x7f", "¡¬®ÿ\xad\xa0", "Ω€😀"):
        ((symbols, _),) = splitter.pre_tokenize_str(text)
        assert [BYTES[symbol] for symbol in symbols] == list(text.encode())
        assert "".join(SYMBOLS[byte] for byte in text.encode()) == symbols


def test_text_of_tokens() -> None:
    assert symbol_text("Ġthe") == " the"
    assert symbol_text("Ã©") == "é"
    assert symbol_text("ĠÃ") == " <0xC3>"
    assert symbol_text("©") == "<0xA9>"
    assert symbol_text("日本") == "日本"
