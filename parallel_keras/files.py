"""The places of a model in its `.keras` file: an entry of the archive that Keras leaves alone."""

import json
import os
import zipfile

from parallel_keras import placement

_ENTRY = "parallel_keras.json"
_VERSION = 1


def write_places(filepath, model):
    """Add a model's places to the file that Keras has just written."""
    places = placement.places_of(model)
    if not places or not _is_archive(filepath):
        return
    with zipfile.ZipFile(filepath, "a") as archive:
        archive.writestr(_ENTRY, json.dumps({"version": _VERSION, "places": places}))


def read_places(filepath, model):
    """Put the places that a file holds on the model that was loaded from it."""
    if not _is_archive(filepath):
        return
    with zipfile.ZipFile(filepath) as archive:
        if _ENTRY not in archive.namelist():
            return
        content = json.loads(archive.read(_ENTRY))
    if content.get("version") != _VERSION:
        raise ValueError(
            f"The places in this file were written by a later parallel_keras. "
            f"Received: {os.fspath(filepath)!r} of version {content.get('version')!r}"
        )
    placement.restore(model, content["places"])


def _is_archive(filepath):
    return str(filepath).endswith(".keras") and zipfile.is_zipfile(filepath)
