"""Which files hold a folder's weights: those that the loaders of Hugging Face take."""

from pathlib import Path

from decoder.checkpoint import read_json
from decoder.errors import DecoderError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

_OTHERS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pth", "*.pt")
_OTHER_LAYOUT = "consolidated"  # Mistral's and Llama's own: other names of tensors


def weight_files(folder: Path) -> list[tuple[Path, set[str] | None]]:
    """The weight files, each with the names that the index says it holds (None without one).

    model.safetensors, whatever stands beside it; where it is missing, the files that its index
    names. Raises `DecoderError` where there is neither, or a file is missing.
    """
    if (folder / SINGLE).is_file():
        return [(folder / SINGLE, None)]
    if not (folder / INDEX).is_file():
        raise DecoderError(_nothing(folder))
    shards = read_index(folder / INDEX)
    missing = sorted(file for file in shards if not (folder / file).is_file())
    if missing:
        raise DecoderError(
            f"{folder} lacks {', '.join(missing)}, named by {INDEX} ({len(missing)} of "
            f"{len(shards)} shard files). Download the missing files"
        )
    return [(folder / file, names) for file, names in sorted(shards.items())]


def read_index(index: Path) -> dict[str, set[str]]:
    """The names of the tensors that each file holds. Raises `DecoderError` for a bad index."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DecoderError(f"{index} has no weight_map; download it again")
    shards: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise DecoderError(f"{index} puts {name} into {file!r}; expected a file name")
        shards.setdefault(file, set()).add(name)
    return shards


def _nothing(folder: Path) -> str:
    """What to do about a folder without weights that the loaders of Hugging Face take."""
    found = sorted({path.name for pattern in _OTHERS for path in folder.glob(pattern)})
    safe = [name for name in found if name.endswith(".safetensors")]
    start = f"{folder} has no {SINGLE} and no {INDEX}"
    if not found:
        return f"{start}. Download the model's weights, too; *.safetensors files are read"
    if not safe:
        return (
            f"{start}, but {', '.join(found)}, which would have to be converted to safetensors: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other_folder)"
        )
    start = f"{start}, but {', '.join(found)}"
    if all(name.startswith(_OTHER_LAYOUT) for name in safe):
        return (
            f"{start}, which names the tensors in another way than config.json's model_type has "
            f"them. Download {SINGLE}, or {INDEX} and the files that it names, of the same model"
        )
    if len(safe) > 1:
        return (
            f"{start}: several weight files, and nothing that says what belongs to the model. "
            f"Download {INDEX}, or give a folder with the one that is meant as {SINGLE}"
        )
    return f"{start}. Rename it to {SINGLE} if it holds the whole model"
