"""Native families of transformers in and out, GGUF, ONNX.

`from_native` and `to_native` turn models, `import_checkpoint` and `export_checkpoint` folders.
"""

from tercet.interop.families import from_native, to_native
from tercet.interop.folders import Converted, export_checkpoint, import_checkpoint

__all__ = ["Converted", "export_checkpoint", "from_native", "import_checkpoint", "to_native"]
