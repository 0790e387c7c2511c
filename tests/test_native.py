"""The C kernels outside Python: under sanitizers, and compiled for another processor; then the extension under one.

`kernels_driver.c` compares all levels and cuts into parts with the plain loop, on random arrays and messages.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from hvd_onebit import kernels

CSRC = Path(__file__).parent.parent / "hvd_onebit" / "csrc"
DRIVER = Path(__file__).with_name("kernels_driver.c")
FLAGS = ["-std=c99", "-ffp-contract=off", "-fno-math-errno", "-pthread", f"-I{CSRC}"]
SANITIZERS = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
CASES = 150
CHECKSUM = "09b6776fdc4391f2"  # of these cases, on any processor

pytestmark = pytest.mark.skipif(not CSRC.is_dir(), reason="needs the sources of the kernels")


def command(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def build_driver(compiler: str, folder: Path, *flags: str) -> Path:
    program = folder / "driver"
    built = command(compiler, *flags, *FLAGS, DRIVER, CSRC / "onebit.c", "-o", program, "-lm")
    assert built.returncode == 0, built.stderr
    return program


def outcome(*words: str | Path) -> tuple[list[str], str]:
    """Levels that the driver tried, and the checksum of all results."""
    ran = command(*words, "1", str(CASES))
    assert ran.returncode == 0, ran.stderr
    *levels, checksum = ran.stdout.split()
    return levels, checksum


def compiler_with_sanitizers(folder: Path) -> str:
    """A C compiler that can, or a skip that says why not."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs gcc or clang")
    source = folder / "nothing.c"
    source.write_text("int main(void) { return 0; }\n")
    program = folder / "nothing"
    if command(compiler, *SANITIZERS, source, "-o", program).returncode or command(program).returncode:
        pytest.skip(f"{compiler} cannot make programs with AddressSanitizer here")
    return compiler


def test_random_arrays_and_messages_under_sanitizers(tmp_path: Path) -> None:
    driver = build_driver(compiler_with_sanitizers(tmp_path), tmp_path, *SANITIZERS)
    levels, checksum = outcome(driver)
    assert levels[0] == "c"
    assert checksum == CHECKSUM
    if kernels.NATIVE:
        assert levels == list(kernels.implementations())[1:]


def test_neon_gives_the_same_bits(tmp_path: Path) -> None:
    compiler, emulator = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("needs aarch64-linux-gnu-gcc and qemu-aarch64 (Debian: gcc-aarch64-linux-gnu, qemu-user)")
    driver = build_driver(compiler, tmp_path, "-O2", "-static")
    assert outcome(emulator, driver) == (["c", "neon"], CHECKSUM)


SPOIL = """
import importlib.util, random, sys
import numpy as np

spec = importlib.util.spec_from_file_location("hvd_onebit._kernels", sys.argv[1])
extension = importlib.util.module_from_spec(spec)
spec.loader.exec_module(extension)
sys.modules["hvd_onebit._kernels"] = extension
from hvd_onebit import kernels, wire

assert kernels.NATIVE and kernels._extension is extension
rng = np.random.default_rng(0)
refused = decoded = 0


def spoilt(message):
    "The message with another length, or as it is, in memory of exactly its size."
    length = len(message) if rng.random() < 0.3 else int(rng.integers(0, 2 * len(message) + 9))
    return np.frombuffer(bytearray((message.tobytes() * 3 + bytes(9))[:length]), np.uint8)


for _ in range(400):
    n, block, ranks = int(rng.integers(0, 5000)), int(rng.choice([1, 7, 8, 100, 2048, 10**6])), int(rng.integers(1, 20))
    message = rng.integers(0, 256, wire.message_num_bytes(n, block), dtype=np.uint8)
    messages = [message] * (ranks - 1) + [spoilt(message)]
    random.shuffle(messages)
    sound = all(len(each) == len(message) for each in messages)
    values, x, v = np.zeros((3, n), np.float32)
    clamped = min(block, max(n, 1))
    for implementation in list(kernels.implementations().values())[1:]:
        level, threads = implementation._backend._level, int(rng.integers(1, 4))
        calls = [
            lambda: implementation.average(messages, values, block=block),
            lambda: extension.average(level, messages, values, clamped, None, threads),
            lambda: implementation.reduce(messages, v, message.copy(), num_elements=n, block=block),
            lambda: extension.reduce(level, messages, v, message.copy(), n, clamped, False, None, threads),
            lambda: extension.reduce(level, [message], v, spoilt(message)[:-1], n, clamped, False, None, threads),
            lambda: implementation.momentum_apply(messages, 0, x, v, num_elements=n, block=block, step_size=1.0),
            lambda: extension.apply(level, messages, 0, x, v, values, n, clamped, 1, 1, 1, 1, False, threads),
            lambda: implementation.compress(values, None, 0.9, v, message.copy(), block=block, kept=messages),
            lambda: extension.compress(
                level, [values], None, messages, 0.9, 0.1, v, message.copy(), clamped, False, None, threads
            ),
        ]
        for call in calls:
            try:
                call()
            except ValueError:
                refused += 1
            else:
                decoded += 1
                assert sound or call is calls[4]
print(refused > 1000, decoded > 1000)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="preloads AddressSanitizer as on Linux")
def test_the_extension_refuses_truncated_messages_under_sanitizers(tmp_path: Path) -> None:
    compiler = compiler_with_sanitizers(tmp_path)
    library = command(compiler, "-print-file-name=libasan.so").stdout.strip()
    if not os.path.isabs(library):
        pytest.skip(f"{compiler} has no AddressSanitizer that can be loaded before Python")
    extension = tmp_path / "_kernels.so"
    sources = [CSRC / "onebit.c", CSRC / "module.c"]
    include = f"-I{sysconfig.get_path('include')}"
    built = command(compiler, *SANITIZERS, *FLAGS, include, "-shared", "-fPIC", *sources, "-o", extension, "-lm")
    if "Python.h" in built.stderr:
        pytest.skip("needs Python's headers")
    assert built.returncode == 0, built.stderr
    ran = command(
        sys.executable, "-c", SPOIL, extension, LD_PRELOAD=library, ASAN_OPTIONS="detect_leaks=0", HVD_ONEBIT_NATIVE="1"
    )
    assert (ran.returncode, ran.stdout) == (0, "True True\n"), ran.stderr
