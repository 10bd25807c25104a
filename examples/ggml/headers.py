"""Headers of ggml from the source package of llama-cpp-python: headers.py FOLDER [VERSION]. They go
to FOLDER/ggml. With a third argument all of that llama.cpp goes to FOLDER/llama.cpp."""
import glob
import os
import subprocess
import sys
import tarfile
import tempfile

folder, version = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "0.3.36"
with tempfile.TemporaryDirectory() as there:
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary",
                    ":all:", "--dest", there, "llama-cpp-python==" + version], check=True)
    with tarfile.open(glob.glob(there + "/*.tar.gz")[0]) as package:
        for member in package:
            path = member.name.partition("/vendor/llama.cpp/")[2]
            name = path.rpartition("/")[2]
            if len(sys.argv) > 3:
                to = "llama.cpp/" + path
            elif path == "ggml/include/" + name or path == "ggml/src/ggml-backend-impl.h":
                to = "ggml/" + name
            else:
                continue
            if not path or not member.isfile() or ".." in path:
                continue
            to = os.path.join(folder, to)
            os.makedirs(os.path.dirname(to), exist_ok=True)
            with open(to, "wb") as f:
                f.write(package.extractfile(member).read())
