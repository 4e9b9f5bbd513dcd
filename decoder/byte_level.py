"""The printable stand-ins that byte-level BPE vocabularies use for the 256 bytes."""


def byte_symbols() -> dict[int, str]:
    """GPT-2's table: printable Latin-1 stands for itself, the other bytes for U+0100 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    table.update({byte: chr(0x100 + place) for place, byte in enumerate(others)})
    return table


SYMBOLS = byte_symbols()
BYTES = {symbol: byte for byte, symbol in SYMBOLS.items()}


def symbol_text(token: str) -> str:
    """The text of one vocabulary entry; bytes that are no whole character as <0xE2>.

    An entry that is not made of byte symbols is returned as it is.
    """
    if not all(symbol in BYTES for symbol in token):
        return token
    raw = bytes(BYTES[symbol] for symbol in token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "".join(chr(byte) if 0x20 <= byte < 0x7F else f"<0x{byte:02X}>" for byte in raw)
