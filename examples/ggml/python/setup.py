"""pip install ./examples/ggml/python builds the plugin (make ggml) and puts it into the package. The
variables that make reads work here too: GGML=folder with a llama.cpp or ggml's headers, CC, CFLAGS."""
import os
import shutil
import subprocess

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

here = os.path.dirname(os.path.abspath(__file__))
top = os.path.abspath(os.path.join(here, "..", "..", ".."))


class Build(build_py):
    def run(self):
        given = [name + "=" + os.environ[name] for name in ("GGML", "CC", "CFLAGS")
                 if os.environ.get(name)]
        subprocess.run(["make", "-C", top, "ggml"] + given, check=True)
        super().run()
        shutil.copy(os.path.join(top, "build", "libggml-ringattn.so"),
                    os.path.join(self.build_lib, "ringattn_ggml"))


class Binary(Distribution):
    def has_ext_modules(self):
        return True


# What is made on the way goes to build/ of the repository.
made = os.path.join(top, "build", "python")
os.makedirs(made, exist_ok=True)
setup(cmdclass={"build_py": Build}, distclass=Binary,
      options={"egg_info": {"egg_base": made}, "build": {"build_base": made}})
