#!/bin/sh
# Install what the build and the tests need (Debian, Ubuntu); nothing to do if it is there.
set -u
packages='gcc g++ libc6-dev make pkg-config git python3 libopenblas-dev libyaml-dev libjansson-dev libutf8proc-dev libxxhash-dev libzstd-dev zlib1g-dev libprotobuf-c-dev protobuf-c-compiler libisal-dev libhwloc-dev libjs-d3 libcmocka-dev'
# Only for --comm mpi, and as large as all others together: who wants it says so.
[ "${MPI:-auto}" != 1 ] || packages="$packages libopenmpi-dev openmpi-bin"
# Only for `make fuzz`.
[ "${FUZZ:-0}" != 1 ] || packages="$packages clang libclang-rt-dev"
missing=''
for p in $packages; do
    dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing="$missing $p"
done
[ -z "$missing" ] && exit 0

line="apt-get update && apt-get install -y --no-install-recommends$missing"
if ! command -v apt-get >/dev/null; then
    echo "These packages are missing (Debian's names); install them with your package manager:$missing"
    exit 1
elif [ "$(id -u)" = 0 ]; then
    run='sh -c'
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null || { [ -t 0 ] && command -v sudo >/dev/null; }; then
    run='sudo sh -c'
else
    echo "Run this as root, then try again:"
    echo "  $line"
    exit 1
fi
echo "installing:$missing"
log=$(mktemp)
if ! DEBIAN_FRONTEND=noninteractive $run "$line" >"$log" 2>&1; then
    tail -20 "$log"
    rm -f "$log"
    echo "Could not install the packages. Run this yourself, then try again:"
    echo "  $line"
    exit 1
fi
rm -f "$log"
