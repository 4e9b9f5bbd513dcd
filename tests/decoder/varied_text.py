"""A few thousand deterministic lines of varied text, for tokenizers."""

import random
import sysconfig
from pathlib import Path

SCRIPTS = (
    "The quick brown fox can't jump; it's tired, they've left, I'm sure he'd say we'll see.",
    "Größe, Straße, naïve café, crème brûlée, Ærøskøbing, Łódź, İstanbul",
    "Быстрая лиса прыгает через ленивую собаку",
    "Η γρήγορη αλεπού πηδά πάνω από το σκυλί",
    "השועל המהיר קפץ מעל הכלב",
    "الثعلب السريع يقفز فوق الكلب ١٢٣",
    "तेज़ लोमड़ी कुत्ते के ऊपर कूदती है १२३",
    "敏捷的棕色狐狸跳过了懒狗，共三次。",
    "すばやい狐がのろまな犬を飛び越える。カタカナも",
    "빠른 갈색 여우가 게으른 개를 뛰어넘는다",
    "สุนัขจิ้งจอกกระโดดข้ามสุนัข",
    "😀 👍🏽 👨‍👩‍👧‍👦 🇩🇪 ❤️ ☃ ∑∫√≠ ½ ² ³ Ⅻ ①",
    "e\u0301 a\u0300 n\u0303 \u200d \ufeff \u00ad \u2028 \u3000 \u00a0",
    "x = 3.14159e-10; y=0x1F; z = 1_000_000; 2026-11-30 12:34:56",
    "    indented\twith\ttabs   and  runs    of     spaces      ",
    "before 1 digit,  2  digits,   33   more,    444    444",
    "C:\\path\\to\\file.txt https://example.org/?q=a&b=c#d {} [] <> () |&*^%$#@!~`",
    "<|im_start|>user\nhello<|im_end|>\n<|endoftext|>",
)
CONTROLS = "\x00\x01\x02\x03\x05\x07\x08\x0b\x0c\x0e\x1b\x1c\x7f\x80\x85\x9f"
GLUE = (" ", "  ", "\n", "\r\n", "\r\n\r\n", "\t", "\n\n\n", "   7", "'s", "'LL", "…", "")


def lines(count: int = 4000) -> list[str]:
    """Half from the standard library's sources, half mixed from scripts, controls and glue."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    code: list[str] = []
    for name in ("argparse.py", "decimal.py", "typing.py", "textwrap.py", "html/entities.py"):
        path = folder / name
        code += path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    mixed = random.Random(0)
    made = [_mixed(mixed) for _ in range(count - min(len(code), count // 2))]
    return [*SCRIPTS, "", " ", "\r\n", *mixed.sample(code, min(len(code), count // 2)), *made]


def _mixed(mixed: random.Random) -> str:
    parts = []
    for _ in range(mixed.randint(1, 5)):
        text = mixed.choice(SCRIPTS)
        start = mixed.randrange(len(text))
        parts.append(text[start : start + mixed.randint(1, 25)])
        parts.append(mixed.choice(GLUE) if mixed.random() < 0.8 else mixed.choice(CONTROLS))
    return "".join(parts)
