"""Package metadata. Tool settings are in pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
INIT = (ROOT / "alignment" / "__init__.py").read_text(encoding="utf-8")
README = ROOT / "README.md"

# constraints.txt has the tested versions; `make test-newest` tests the newest ones that are allowed. Upper ends: the
# next release that may break an interface; for DeepSpeed that is the next minor one, for alignment/internals/ works
# with its inner parts. Lower ends were set by reading, not by running: transformers 5 and DeepSpeed 0.19 are the
# interfaces written against; torch binds NCCL groups to a device without hanging since 2.7.1.
# huggingface_hub 1.20 is the first release whose upload_folder resumes an interrupted upload.
# rollout_backend: continuous needs transformers 5.20, and is refused by name with an older one.
REQUIRED = [
    "torch>=2.8,<3",
    "deepspeed>=0.19,<0.20",
    "transformers>=5.0,<6",
    "datasets>=4.0,<6",
    "peft>=0.18,<1",
    "bitsandbytes>=0.48,<1",
    "safetensors>=0.5,<1",
    "filelock>=3.30,<5",
    "httpx>=0.27,<1",
    "huggingface_hub>=1.20,<3",
    "pydantic>=2.5,<3",
    "pyyaml>=6.0,<7",
    "tqdm>=4.66.3,<5",
    "psutil>=5.9",
    "xxhash>=3.0,<5",
    "matplotlib>=3.8,<4",
    "jinja2>=3.1,<4",
]

EXTRAS = {
    "test": [
        "pytest>=8,<9.2",  # 9.2 and pytest-xdist 3.8 deal out groups test by test (pytest-xdist #1386)
        "pytest-xdist>=3.8,<4",
        "hypothesis>=6.100,<7",
        "tensorboard>=2.16",
        "wandb>=0.19",
        "ruff>=0.12",
        "mypy>=1.15",
        "import-linter>=2.16,<3",
        "build>=1.2,<2",
        "twine>=6,<7",
        "types-PyYAML",
        # The tests that run the code blocks of the documentation read them with the parser of the site.
        "markdown-it-py>=3,<5",
        "mdit-py-plugins>=0.4.1,<0.8",
        # Its interpreter runs the head's kernels on a CPU. Users have the release that torch's CUDA wheels pin.
        "triton>=3.4,<4",
        "liger-kernel>=0.8,<0.9",
        "openai>=2,<4",
    ],
    # For a model as the judge of Online DPO.
    "judges": ["openai>=2,<4"],
    # For use_liger_kernel: 0.8 is the release whose kernels were compared with transformers' layers, type by type.
    "liger": ["liger-kernel>=0.8,<0.9"],
    # For what TRL's scripts import beside trainers and configurations: the releases that import with transformers 5.
    "trl": ["trl>=0.24,<2", "accelerate>=1.10,<2"],
    # For `make docs`.
    "docs": [
        "sphinx>=8.1,<10",
        "myst-parser>=4,<6",
        "furo>=2024.8.6",
        "sphinx-copybutton>=0.5.2,<0.6",
    ],
    # For `make mutants`: mutmut's operators on syntax trees, and which tests run which lines.
    "mutants": ["mutmut==3.8.*", "pytest-cov>=7,<8"],
    # For benchmarks/side_by_side.py: the release whose trainers it was written against.
    "bench": ["trl==1.16.*", "accelerate>=1.10,<2"],
}

version = re.search(r'^__version__ = "(.+)"$', INIT, re.MULTILINE)
if version is None:
    raise RuntimeError('alignment/__init__.py has no line __version__ = "…"')

setup(
    name="deepspeed-alignment",
    version=version[1],
    description="KTO, CPO, DPO and Online DPO on DeepSpeed engines: full fine-tuning, LoRA and QLoRA",
    long_description=README.read_text(encoding="utf-8") if README.is_file() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    install_requires=REQUIRED,
    extras_require=EXTRAS,
    # Configurations, recipes and launch scripts lie beside the package in the repository, inside it when installed.
    packages=[*find_packages(include=["alignment", "alignment.*"]), "alignment.ds_configs", "alignment.launch"],
    package_dir={"alignment.ds_configs": "ds_configs", "alignment.launch": "launch"},
    package_data={
        "alignment": ["py.typed"],
        "alignment.reporting": ["templates/*"],
        "alignment.ds_configs": ["*.json", "*.md"],
        "alignment.launch": ["recipes/*.yaml", "slurm/*.sbatch"],
    },
    entry_points={"console_scripts": ["deepspeed-alignment = alignment.cli.commands:main"]},
    zip_safe=False,
    classifiers=[
        "Programming Language :: Python :: 3",
        "Operating System :: POSIX :: Linux",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
