"""`import tessera` costs nothing: the services, which need its messages alone, do it too."""

import subprocess
import sys

import tessera
from services.launcher import offline


def test_the_package_imports_nothing_until_it_is_asked() -> None:
    script = """
import sys, tessera
loaded = set(sys.modules)
assert not {name for name in loaded if name.startswith(("services", "torch", "pydantic"))}, loaded
from tessera import LLM, SamplingParams
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_its_names_are_those_of_offline_use() -> None:
    assert sorted(tessera.__all__) == sorted(offline.__all__)
    assert set(tessera.__all__) <= set(dir(tessera))
    assert tessera.LLM is offline.LLM and not hasattr(tessera, "no_such_name")
