"""The stored records: one file per run, written once, as a whole, equal bytes for equal numbers."""

import gzip
import json
import os
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

from study.grid import VERSION, Cell, cells

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Store:
    """Records in a folder, one file per cell."""

    folder: Path

    def path(self, cell: Cell) -> Path:
        return self.folder / f"{cell.name}.json.gz"

    def add(self, cell: Cell, record: dict) -> None:
        """Store a record. The file appears whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(record, separators=(",", ":"))
        temporary = self.path(cell).with_suffix(".tmp")
        temporary.write_bytes(gzip.compress(text.encode(), mtime=0))
        os.replace(temporary, self.path(cell))

    def records(self) -> dict[Cell, dict]:
        """The records of the grid's cells that are stored. Of a file that is no use one line says why."""
        grid = cells()
        known = {self.path(cell): cell for cell in grid}
        found = {}
        for path in sorted(self.folder.glob("*.json.gz")):
            try:
                found[known[path]] = read(path, known[path])
            except KeyError:
                print(f"{path}: left out, the grid has no such cell", file=sys.stderr)
            except ValueError as error:
                problem = f"{error!s:.200}; a run without --list measures it anew"
                print(f"{path}: left out, {problem}", file=sys.stderr)
        return {cell: found[cell] for cell in grid if cell in found}


def read(path: Path, cell: Cell) -> dict:
    """The record of a cell. Raises ValueError if it cannot be used."""
    try:
        record = json.loads(gzip.decompress(path.read_bytes()))
        version = record["version"]
        command = record["command"]
        float(record["policies"][cell.method]["0.7"]["W@30"])  # it was measured
    except (OSError, EOFError, ValueError, LookupError, TypeError, zlib.error) as error:
        raise ValueError(f"it cannot be read ({error})") from error
    if str(version).partition(".")[0] != VERSION:
        raise ValueError(f"it is of version {version}, not {VERSION}")
    if command != cell.shown_command:
        raise ValueError(f"it is of the command {command}")
    return record
