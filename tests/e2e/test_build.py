"""A build tree outlives what the machine had when it was made."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT


def test_a_cuda_compiler_may_come_later(tmp_path):
    """demo/run.sh without one, then tests/run.sh, which brings one, in the same tree."""
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if not nvcc or not shutil.which("cmake"):
        pytest.skip("no nvcc or no cmake")
    programs = tmp_path / "programs"
    programs.mkdir()
    for folder in os.environ["PATH"].split(os.pathsep):
        for program in Path(folder).glob("*") if folder else ():
            if program.name != "nvcc" and not os.path.lexists(programs / program.name):
                (programs / program.name).symlink_to(program)
    env = {name: value for name, value in os.environ.items() if not name.startswith("CUDA")} | {"PATH": str(programs)}

    def configure(*more, **variables):
        command = ["cmake", "-S", ROOT, "-B", tmp_path / "build", "-DBD_TESTS=OFF", *more]
        return subprocess.run(command, env=env | variables, capture_output=True, text=True, timeout=300)

    first = configure()
    assert first.returncode == 0, first.stderr
    refused = configure("-DBD_CUDA=on")
    assert refused.returncode != 0 and "no CUDA compiler was found" in refused.stderr
    later = configure("-DBD_CUDA=on", CUDACXX=nvcc)
    assert later.returncode == 0, later.stderr
