#!/bin/sh
# Build for a GPU machine that has the driver and CUDA's libraries but no build tools, and collect
# what must travel in build/gpu/.
#
#     build/gpu/bin/       tessera, stripped, as are
#     build/gpu/tests/     the cuda_* tests and
#     build/gpu/bench/     the cuda_* benches and checkpoint_ranks
#     build/gpu/lib/       the libraries that such a machine may lack (BLAS, YAML, JSON, ...)
#     build/gpu/run        runs one with all found: build/gpu/run tessera train ...
#
# usage: scripts/gpu-carry.sh        then, over there: bench/gpu/check.py, bench/gpu/steps.py
#
# CUDA_ARCH (90: H100, H200) is the one kind of card it is for. The objects are kept in build/carry.
set -eu
cd "$(dirname "$0")/.."
arch=${CUDA_ARCH:-90}
code=$arch
[ "$code" != 90 ] || code=90a # as scripts/detect.sh does it
objects=build/carry
out=build/gpu
limit_kib=$((64 * 1024))

programs=$(ls tests/cuda_*.c bench/cuda_*.c bench/checkpoint_ranks.c 2>/dev/null | sed 's/\.c$//')
targets=$objects/tessera
for p in $programs; do
    targets="$targets $objects/$p"
done
# One architecture, compressed: the kernels are in every program.
# shellcheck disable=SC2086
make --no-print-directory -j"${JOBS:-2}" CUDA=1 CUDA_ARCH="$arch" MPI=0 BUILD=$objects \
    CUDA_GENCODE="-gencode arch=compute_$code,code=sm_$code" \
    NVCCFLAGS='--compress-mode=size' $targets

rm -rf $out
mkdir -p $out/bin $out/tests $out/bench $out/lib
strip -s -o $out/bin/tessera $objects/tessera
for p in $programs; do
    strip -s -o "$out/$p" "$objects/$p"
done

# Records kernels for bench/gpu/breakdown.py; not needed for anything else.
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
cuda=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
for cuda in "$cuda" /usr/local/cuda; do
    cupti=$(ls "$cuda"/lib*/libcupti.so.1? "$cuda"/extras/CUPTI/lib64/libcupti.so.1? 2>/dev/null | head -n 1)
    [ -n "$cupti" ] && [ -e "$cuda/include/cupti.h" ] && break
done
if [ -n "$cupti" ]; then
    cc -std=c11 -D_GNU_SOURCE -O2 -fPIC -shared -I"$cuda/include" bench/gpu/kernels.c \
        -o $out/lib/libkernels.so "$cupti" -lpthread || echo "without libkernels.so" >&2
fi

# Everything they need but the C library and what comes with the driver and CUDA.
for p in bin/tessera $programs; do
    ldd "$out/$p"
done | awk '$2 == "=>" && $3 ~ /^\// { print $1, $3 }' | sort -u | while read -r name path; do
    case $name in
    libc.so.* | libm.so.* | libpthread.so.* | libdl.so.* | librt.so.* | ld-linux* | libstdc++.so.* | libgcc_s.so.*) ;;
    libcuda.so.* | libcudart.so.* | libcublas*.so.* | libnccl.so.* | libnv*.so.*) ;;
    *) cp -L "$path" "$out/lib/$name" && strip --strip-unneeded "$out/lib/$name" ;;
    esac
done

cat >$out/run <<'RUN'
#!/bin/sh
# Run "tessera", "tests/NAME" or "bench/NAME" of this folder, or any other program, with the
# libraries beside it and with CUDA's, which may lie in several folders: each is taken from the first
# place that has it.
here=$(cd "$(dirname "$0")" && pwd)
path=$here/lib
find_library() {
    for d in ${CUDA_HOME:+"$CUDA_HOME/lib64"} ${NCCL_HOME:+"$NCCL_HOME/lib"} /usr/local/cuda/lib64 \
        /usr/local/cuda/lib /usr/local/cuda/extras/CUPTI/lib64 \
        /usr/local/cuda/targets/x86_64-linux/lib /usr/lib/x86_64-linux-gnu \
        /usr/local/lib "$(ldconfig -p 2>/dev/null | sed -n "s|.*$1 .*=> \(.*\)/$1\$|\1|p" | head -n 1)"; do
        if [ -e "$d/$1" ]; then
            echo "$d"
            return
        fi
    done
    # Wheels of PyTorch bring their own.
    python3 - "$1" 2>/dev/null <<'PY'
import glob, os, site, sys
for top in site.getsitepackages() + [site.getusersitepackages()]:
    for path in sorted(glob.glob(os.path.join(top, "nvidia", "**", sys.argv[1]), recursive=True)):
        print(os.path.dirname(path))
        sys.exit()
PY
}
if [ -n "${TESSERA_CUDA_PATH:-}" ]; then # found before
    path=$path:$TESSERA_CUDA_PATH
else
    found=''
    for name in libcudart.so.13 libcublasLt.so.13 libnccl.so.2; do
        d=$(find_library $name)
        [ -n "$d" ] || { echo "$0: $name was not found" >&2; exit 1; }
        case :$found: in *:"$d":*) ;; *) found=${found:+$found:}$d ;; esac
    done
    cupti=$(find_library libcupti.so.13)
    case :$found: in *:"$cupti":*) ;; *) found=$found${cupti:+:$cupti} ;; esac
    path=$path:$found
    TESSERA_CUDA_PATH=$found
fi
export TESSERA_CUDA_PATH LD_LIBRARY_PATH="$path${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
program=$1
shift
for p in "$here/bin/$program" "$here/$program"; do
    [ -x "$p" ] && [ ! -d "$p" ] && program=$p && break
done
exec "$program" "$@"
RUN
chmod +x $out/run

$out/run tessera --version >/dev/null 2>&1 || $out/run tessera --help >/dev/null ||
    { echo "build/gpu/run tessera does not start here" >&2; exit 1; }
kib=$(du -sk $out | cut -f1)
du -k $out/*/* | sort -n | awk '{ printf "%8d KiB  %s\n", $1, $2 }'
echo "$out: $kib KiB"
[ "$kib" -le $limit_kib ] || { echo "$out is larger than $limit_kib KiB" >&2; exit 1; }
