"""Joining the parts that several machines have prepared into one set, which stands there for whoever trains on it."""

import hashlib
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tercet.training.documents import DataError
from tercet.training.shard_files import (
    explained,
    remove_shards,
    remove_temporary_files,
    settings_fingerprint,
    shard_name,
    write_file,
    write_index,
    write_manifest,
)
from tercet.training.skips import SkipReport
from tercet.training.token_set import (
    LABELS_SUFFIX,
    MANIFEST,
    TRAIN,
    VALIDATION,
    PreparedData,
    ShardIndex,
    SourceReport,
    differing_settings,
    read_manifest,
)


def merge(parts: Sequence[Path], data_dir: Path) -> PreparedData:
    """Join parts 0 to n - 1 of one corpus, each made by `prepare(..., part=(i, n))`, into a set in `data_dir`.

    The set has the documents, tokens and counts of one that is prepared in one go, split in the same way; its order is
    another: part after part, each in the order of its reading. The parts may be given in any order and stay as they
    are. An interrupted merge leaves no set, and begins anew.

    Raises:
        DataError: If a part is missing, given twice or unfinished; if parts differ in tokenizer, settings or corpus;
            if `data_dir` holds another set; if a split is empty, or the disk is full.
    """
    folders = [Path(part) for part in parts]
    manifests = [read_manifest(folder) for folder in folders]
    order = _checked_order(folders, manifests)
    data_dir = Path(data_dir)
    settings: dict[str, Any] = {**manifests[0]["settings"], "merged_parts": len(folders)}
    del settings["part"]
    _refuse_another_set(data_dir, settings)
    data_dir.mkdir(parents=True, exist_ok=True)
    remove_temporary_files(data_dir)
    remove_shards(data_dir, 0)
    fingerprint = settings_fingerprint(settings)
    content = hashlib.blake2b(digest_size=16)
    by_source: dict[str, SourceReport] = {}
    names: list[str] = []
    splits: set[int] = set()
    for number in order:
        content.update(manifests[number]["content"].encode())
        for name in manifests[number]["shards"]:
            index = ShardIndex.load(folders[number], name, settings["dtype"])
            if index.fingerprint != manifests[number]["settings_fingerprint"]:
                raise DataError(f"{folders[number]} holds shards that its manifest does not know. Prepare it again.")
            names.append(shard_name(len(names)))
            _copy_shard(folders[number], data_dir, index, names[-1], fingerprint)
            splits.update(index.split.tolist())
            for source, counts in index.report.items():
                by_source[source] = by_source.get(source, SourceReport()) + counts
    if settings["validation_fraction"] and (missing := {TRAIN, VALIDATION} - splits):
        remove_shards(data_dir, 0)
        lacking = "training" if TRAIN in missing else "validation"
        raise DataError(f"None of the documents falls into the {lacking} split. Change validation_fraction.")
    # Every part has read the whole corpus, and left out the same rows of it.
    skips = SkipReport.from_dict(manifests[0].get("skipped", {}))
    write_manifest(data_dir, settings, content.hexdigest(), names, by_source, skips)
    return PreparedData.open(data_dir)


def merged_set(data_dir: Path, settings: dict[str, Any]) -> PreparedData | None:
    """The set that stands there if it is one of parts: to read the corpus for it is what merging was to spare.

    Raises:
        DataError: If it was made with other settings than these.
    """
    different = differing_settings(data_dir, settings)
    if "merged_parts" not in different:
        return None
    different.remove("merged_parts")
    if different:
        raise DataError(
            f"{data_dir} holds a set that was merged from parts with other settings (different: "
            f"{', '.join(different)}). Merge parts of these settings, or choose another folder."
        )
    return PreparedData.open(data_dir)


def _checked_order(folders: list[Path], manifests: list[dict[str, Any]]) -> list[int]:
    """Places of parts 0, 1, ... in the list, once it is certain that they are the parts of one set."""
    numbers: list[int] = []
    for folder, manifest in zip(folders, manifests, strict=True):
        if "part" not in manifest["settings"]:
            raise DataError(f"{folder} is no part of a set, but a whole one. Prepare parts with --shard i/n.")
        numbers.append(manifest["settings"]["part"][0])
    if not manifests:
        raise DataError("There is no part to merge. Name the folders of all parts.")
    for folder, manifest in zip(folders[1:], manifests[1:], strict=True):
        _compare(folders[0], manifests[0], folder, manifest)
    num_parts = manifests[0]["settings"]["part"][1]
    if twice := [number for number, count in Counter(numbers).items() if count > 1]:
        both = " and ".join(str(folder) for folder, number in zip(folders, numbers, strict=True) if number == twice[0])
        raise DataError(f"Part {twice[0]} of {num_parts} is given twice: {both}. Name each part once.")
    if missing := sorted(set(range(num_parts)) - set(numbers)):
        shown = ", ".join(f"{number}/{num_parts}" for number in missing[:5]) + (" ..." if len(missing) > 5 else "")
        are = "is" if len(missing) == 1 else "are"
        raise DataError(f"{len(missing)} of {num_parts} parts {are} missing: {shown}. Prepare them, and name them all.")
    return sorted(range(len(numbers)), key=numbers.__getitem__)


def _compare(first_folder: Path, first: dict[str, Any], folder: Path, manifest: dict[str, Any]) -> None:
    """Refuse two parts that are not of one set."""
    expected, found = first["settings"], manifest["settings"]
    if found["part"][1] != expected["part"][1]:
        raise DataError(
            f"{folder} is a part of {found['part'][1]}, and {first_folder} of {expected['part'][1]}. Give the parts of "
            f"one division."
        )
    different = [k for k in sorted({*expected, *found}) if k != "part" and expected.get(k) != found.get(k)]
    if "tokenizer" in different:
        raise DataError(
            f"{folder} was tokenized with another tokenizer than {first_folder}. Prepare all parts with one: set "
            f"tokenizer.path."
        )
    if different:
        shown = ", ".join(f"{key} {found.get(key)!r} and {expected.get(key)!r}" for key in different)
        raise DataError(f"{folder} and {first_folder} were prepared with different settings: {shown}. Use one recipe.")
    if manifest.get("corpus") != first.get("corpus"):
        raise DataError(
            f"{folder} and {first_folder} were cut from different documents, or in a different order: documents would "
            f"be lost or doubled. Prepare all parts from the same files."
        )


def _refuse_another_set(data_dir: Path, settings: dict[str, Any]) -> None:
    if (data_dir / MANIFEST).exists():
        held = read_manifest(data_dir)["settings"]
        if held != settings:
            raise DataError(f"{data_dir} holds another set of prepared data. Choose another folder, or remove it.")


def _copy_shard(folder: Path, data_dir: Path, index: ShardIndex, name: str, fingerprint: str) -> None:
    for suffix in (".bin", *([LABELS_SUFFIX] if index.has_labels else [])):
        source, target = folder / f"{index.name}{suffix}", data_dir / f"{name}{suffix}"
        with explained(target), source.open("rb") as stream:
            write_file(target, lambda file, stream=stream: shutil.copyfileobj(stream, file, 1 << 22))
    write_index(data_dir, replace(index, name=name, fingerprint=fingerprint))
