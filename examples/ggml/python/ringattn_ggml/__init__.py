"""Makes the llama.cpp inside an installed Python package compute its attention by ringattn.h:

    import ringattn_ggml
    ringattn_ggml.load()           # before the first context is made

The package may be llama-cpp-python, llama-cpp-py-sync, xllamacpp or pywhispercpp."""
import ctypes
import glob
import importlib.util
import os
import sys

# Where each package has the library that exports ggml_backend_load_all, in the order of trying.
PACKAGES = {
    "llama_cpp": ["lib/libggml.so*", "lib/libggml.dylib", "lib/ggml.dll", "lib/libllama.so*"],
    "llama_cpp_py_sync": ["libggml.so*", "libggml*.dylib", "ggml.dll", "libllama.so*"],
    "xllamacpp": ["xllamacpp*.so", "xllamacpp*.pyd"],
    "pywhispercpp": ["../pywhispercpp.libs/libggml-?*.so*", "../libggml.so*"],
}


def path():
    """The plugin."""
    for name in ("libggml-ringattn.so", "libggml-ringattn.dylib", "ggml-ringattn.dll"):
        file = os.path.join(os.path.dirname(os.path.abspath(__file__)), name)
        if os.path.exists(file):
            return file
    raise FileNotFoundError("libggml-ringattn is not in the package")


def _registered(lib):
    lib.ggml_backend_reg_by_name.restype = ctypes.c_void_p
    lib.ggml_backend_reg_by_name.argtypes = [ctypes.c_char_p]
    return lib.ggml_backend_reg_by_name(b"RINGATTN") is not None


def load(package=None):
    """Loads the plugin into the engine of `package`, or of every installed one that is known, or
    only of those already imported if there are any. Returns the names of the packages that use it.
    Packages whose CPU backend is linked in do not look at the variable by themselves."""
    os.environ["GGML_BACKEND_PATH"] = path()
    names = [package] if package else [n for n in PACKAGES if n in sys.modules] or list(PACKAGES)
    used = []
    for name in names:
        spec = importlib.util.find_spec(name)
        folder = os.path.dirname(spec.origin) if spec and spec.origin else None
        files = [f for p in PACKAGES[name] for f in sorted(glob.glob(os.path.join(folder, p)))] \
            if folder else []
        for file in files:
            lib = ctypes.CDLL(file)
            if not hasattr(lib, "ggml_backend_load_all"):
                continue
            if not _registered(lib):
                lib.ggml_backend_load_all()
            if _registered(lib):
                used.append(name)
            break
    if package and not used:
        raise RuntimeError("the engine of %s does not use the plugin" % package)
    return used
