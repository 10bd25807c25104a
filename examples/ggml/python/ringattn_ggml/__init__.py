"""Makes the llama.cpp inside an installed Python package compute its attention by ringattn.h:

    import ringattn_ggml
    ringattn_ggml.load()           # before the first context is made

The package may be llama-cpp-python, llama-cpp-py-sync, xllamacpp or pywhispercpp. A library that
LLAMA_CPP_LIB_PATH or LLAMA_CPP_LIB names for the first two is found too. Those two leave flash
attention off, and then nothing is computed here, unless they are told: Llama(..., flash_attn=True)
and Llama(..., flash_attn_type=-1)."""
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


# Variables with which a package's user names libraries of his own: their folder, or a file there.
GIVEN = {"llama_cpp": "LLAMA_CPP_LIB_PATH", "llama_cpp_py_sync": "LLAMA_CPP_LIB"}


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


def _libraries(name):
    spec = importlib.util.find_spec(name)
    if not spec or not spec.origin:
        return []
    places = [os.path.join(os.path.dirname(spec.origin), p) for p in PACKAGES[name]]
    given = os.environ.get(GIVEN.get(name, ""))
    if given:
        folder = given if os.path.isdir(given) else os.path.dirname(given)
        own = [os.path.join(folder, os.path.basename(p)) for p in PACKAGES[name]]
        # The first package prefers the user's library, the second one its own.
        places = own + places if name == "llama_cpp" else places + own
    return [file for p in places for file in sorted(glob.glob(p))]


def load(package=None):
    """Loads the plugin into the engine of `package`, or of every installed one that is known, or
    only of those already imported if there are any. Returns the names of the packages that use it.
    Packages whose CPU backend is linked in do not look at the variable by themselves."""
    os.environ["GGML_BACKEND_PATH"] = path()
    names = [package] if package else [n for n in PACKAGES if n in sys.modules] or list(PACKAGES)
    used, why = [], ""
    for name in names:
        for file in _libraries(name):
            try:
                lib = ctypes.CDLL(file)
            except OSError as e:       # one that this system cannot load serves nobody
                why = ": %s" % e
                continue
            if not hasattr(lib, "ggml_backend_load_all"):
                continue
            if not _registered(lib):
                lib.ggml_backend_load_all()
            if _registered(lib):
                used.append(name)
            break
    if package and not used:
        raise RuntimeError("the engine of %s does not use the plugin%s" % (package, why))
    return used
