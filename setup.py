"""Packages by hand, and the C kernels; everything else stands in pyproject.toml.

The framework layers lie beside the core, in folders whose names cannot be mistaken for the frameworks themselves, and
are installed below it.
"""

import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDERS = {
    "hvd_onebit": "hvd_onebit",
    "hvd_onebit.transport": "hvd_onebit/transport",
    "hvd_onebit.torch": "torch_impl",
    "hvd_onebit.tensorflow": "tf_impl",
}
PACKAGES = {name: folder for name, folder in FOLDERS.items() if Path(folder, "__init__.py").is_file()}

REQUIRE_NATIVE = os.environ.get("HVD_ONEBIT_REQUIRE_NATIVE") == "1"


class BuildKernels(build_ext):
    """Builds the C kernels; says so loudly if that fails, as everything then works, but ten times slower."""

    def run(self) -> None:
        """Builds all extensions, then looks whether they are there."""
        super().run()
        for extension in self.extensions:
            if not Path(self.get_ext_fullpath(extension.name)).is_file():
                self.warn(
                    "*** the C kernels of hvd_onebit were not built (is there a C compiler?): the NumPy kernels will "
                    "be used, which give the same results about ten times slower. "
                    "Set HVD_ONEBIT_REQUIRE_NATIVE=1 to make this an error. ***"
                )


setup(
    packages=list(PACKAGES),
    package_dir=PACKAGES,
    package_data={"hvd_onebit": ["py.typed"]},
    include_package_data=False,
    ext_modules=[
        Extension(
            "hvd_onebit._kernels",
            sources=["hvd_onebit/csrc/onebit.c", "hvd_onebit/csrc/module.c"],
            depends=["hvd_onebit/csrc/onebit.h"],
            include_dirs=["hvd_onebit/csrc"],
            # Contraction into fused multiply-adds would round differently from NumPy and from one machine to the next.
            extra_compile_args=["-O3", "-std=c99", "-ffp-contract=off", "-fno-math-errno", "-pthread"],
            extra_link_args=["-pthread"],
            optional=not REQUIRE_NATIVE,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
