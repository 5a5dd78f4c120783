"""First on PYTHONPATH, Python runs this at its start: the process and its children have no Tercet, as a reader's."""

import sys


class NoTercet:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "tercet":
            raise ModuleNotFoundError(f"No module named {name!r} (blocked)", name=name)


sys.meta_path.insert(0, NoTercet())
