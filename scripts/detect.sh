#!/bin/sh
# Find compilers and libraries, print what was chosen, keep it in a make fragment.
#
# usage: CC= NVCC= CUDA=auto|0|1 CUDA_ARCH= MPI=auto|0|1 D3_JS= D3_LICENCE= detect.sh OUTPUT
# Exit 1, with one line a problem, when something needed is missing.
set -u
output=$1
key="CC=$CC NVCC=$NVCC CUDA=$CUDA CUDA_ARCH=$CUDA_ARCH MPI=$MPI($(command -v mpicc)) PKG=${PKG_CONFIG_PATH:-} D3=$D3_JS $D3_LICENCE script=$(cksum <"$0")"
if [ -f "$output" ] && grep -qxF "# $key" "$output"; then
    exit 0
fi
mkdir -p "$(dirname "$output")"
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT

# probe NAME HEADER SYMBOL LIBS [CFLAGS]: does a program with this header and symbol link?
probe() {
    printf '#include <%s>\nint main(void) { return (void *)(%s) == (void *)0; }\n' "$2" "$3" >"$work/p.c"
    # shellcheck disable=SC2086
    "$CC" -D_GNU_SOURCE ${5:-} "$work/p.c" -o "$work/p" $4 >"$work/log" 2>&1
}

cflags='' libs='' missing='' found=''
# need NAME PKG HEADER SYMBOL FALLBACK_LIBS
need() {
    c='' l=$5
    if pkg-config --exists "$2" 2>/dev/null; then
        c=$(pkg-config --cflags "$2") l=$(pkg-config --libs "$2")
    fi
    if probe "$1" "$3" "$4" "$l" "$c"; then
        cflags="$cflags $c" libs="$libs $l" found="$found $1"
    else
        missing="$missing $1"
    fi
}
need OpenBLAS openblas cblas.h cblas_sgemm -lopenblas
need libyaml yaml-0.1 yaml.h yaml_parser_parse -lyaml
need jansson jansson jansson.h json_loadb -ljansson
need utf8proc libutf8proc utf8proc.h utf8proc_decompose_char -lutf8proc
need xxHash libxxhash xxhash.h XXH3_64bits -lxxhash
need zlib zlib zlib.h gzopen -lz
need protobuf-c libprotobuf-c protobuf-c/protobuf-c.h protobuf_c_message_pack -lprotobuf-c
need ISA-L libisal isa-l/crc.h crc32_iscsi -lisal
command -v protoc-c >/dev/null || missing="$missing protoc-c"
need hwloc hwloc hwloc.h hwloc_topology_load -lhwloc
need zstd libzstd zstd.h ZSTD_compressCCtx -lzstd
# The charts of a report. Both files are put into its page, where some text would end the element.
d3='the package libjs-d3, or name another place:'
if ! grep -q 'version: *"3\.' "$D3_JS" 2>/dev/null; then
    echo "D3_JS: $D3_JS is not there or is not d3 3.x ($d3 D3_JS=FILE)" >&2
    missing="$missing d3"
elif grep -qi -e '</script' -e '<!--' "$D3_JS"; then
    echo "D3_JS: $D3_JS has a </script or <!-- in it and cannot stand in a page" >&2
    exit 1
fi
if ! grep -qi 'redistribution' "$D3_LICENCE" 2>/dev/null; then
    echo "D3_LICENCE: $D3_LICENCE is not there or is not d3's licence ($d3 D3_LICENCE=FILE)" >&2
    missing="$missing d3's-licence"
elif grep -q -e '-->' -e '--!>' "$D3_LICENCE"; then
    echo "D3_LICENCE: $D3_LICENCE has a --> in it and cannot stand in a page's comment" >&2
    exit 1
fi
found="$found d3"
if [ -n "$missing" ]; then
    echo "missing:$missing (run \`make deps\`)" >&2
    exit 1
fi

# CPU ranks as processes. MPI's flags are for all files: its header is in one of them.
have_mpi=''
if [ "$MPI" != 0 ]; then
    c='' l='' why=''
    if pkg-config --exists ompi-c 2>/dev/null; then
        c=$(pkg-config --cflags ompi-c) l=$(pkg-config --libs ompi-c)
    elif command -v mpicc >/dev/null; then
        # Open MPI's wrapper, else MPICH's.
        c=$(mpicc --showme:compile 2>/dev/null || mpicc -compile_info 2>/dev/null | tr ' ' '\n' | grep '^-I' | tr '\n' ' ')
        l=$(mpicc --showme:link 2>/dev/null || mpicc -link_info 2>/dev/null | tr ' ' '\n' | grep '^-[LlW]' | tr '\n' ' ')
    else
        why='mpicc not found; make deps MPI=1 installs it'
    fi
    if [ -z "$why" ] && ! probe MPI mpi.h MPI_Ialltoall "$l" "$c"; then
        why='MPI does not link'
    fi
    if [ -z "$why" ]; then
        # Programs that do not call it do not load it.
        have_mpi=1 cflags="$cflags $c" libs="$libs -Wl,--push-state,--as-needed $l -Wl,--pop-state" found="$found MPI"
    elif [ "$MPI" = 1 ]; then
        echo "MPI=1: $why" >&2
        exit 1
    else
        found="$found no-MPI($why)"
    fi
fi

# What is wrong with an architecture, or nothing. The kernels have bf16 products of sm_80.
arch_problem() {
    number=${1%[a-z]}
    case $number in
    '' | *[!0-9]*) echo "$1 is no architecture, as 90 is" ;;
    *)
        if [ "$number" -lt 80 ]; then
            echo "sm_$1 is too old, sm_80 is the first"
        elif ! "$nvcc" --list-gpu-arch | grep -qx "compute_$number"; then
            echo "$nvcc does not know $1 (nvcc --list-gpu-arch)"
        fi
        ;;
    esac
}

have_cuda='' gencode=''
if [ "$CUDA" != 0 ]; then
    nvcc=$(command -v "$NVCC" 2>/dev/null || { [ "$NVCC" = nvcc ] && ls /usr/local/cuda/bin/nvcc 2>/dev/null; })
    why=''
    if [ -z "$nvcc" ]; then
        why="$NVCC not found"
    else
        # The real toolkit folder, also where nvcc is a wrapper or a link.
        home=$("$nvcc" -dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p')
        [ -d "$home" ] || home=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
        inc='' lib=''
        for d in "$home/include" "$home/targets/x86_64-linux/include" "$home/targets/sbsa-linux/include" ${NCCL_HOME:+"$NCCL_HOME/include"}; do
            [ -d "$d" ] && inc="$inc -I$d"
        done
        for d in "$home/lib64" "$home/lib" "$home/targets/x86_64-linux/lib" "$home/targets/sbsa-linux/lib" /usr/lib/x86_64-linux-gnu ${NCCL_HOME:+"$NCCL_HOME/lib"}; do
            [ -e "$d/libcublasLt.so" ] || [ -e "$d/libcudart.so" ] || [ -e "$d/libnccl.so" ] && lib="$lib -L$d -Wl,-rpath,$d"
        done
        if ! probe cudart cuda_runtime.h cudaGetDeviceCount "$lib -lcudart" "$inc"; then
            why='the CUDA runtime does not link'
        elif ! probe cublasLt cublasLt.h cublasLtMatmul "$lib -lcublasLt" "$inc"; then
            why='cuBLASLt does not link'
        elif ! probe nccl nccl.h ncclAllGather "$lib -lnccl -lcudart" "$inc"; then
            why='NCCL does not link'
        else
            arch=$CUDA_ARCH
            if [ -z "$arch" ]; then
                arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d . | sort -u | tr '\n' ' ')
            fi
            [ -n "${arch# }" ] || arch='80 90'
            for a in $arch; do
                why=$(arch_problem "$a")
                [ -z "$why" ] || break
            done
            if [ -n "$why" ] && [ -n "$CUDA_ARCH" ]; then
                echo "CUDA_ARCH: $why" >&2
                exit 1
            fi
        fi
        if [ -z "$why" ]; then
            have_cuda=1
            cflags="$cflags $inc" libs="$libs $lib -lcublasLt -lnccl -lcudart -lstdc++"
            found="$found CUDA($nvcc)"
            for a in $arch; do
                [ "$a" != 90 ] || a=90a # all cards of 9.0 have its own instructions too
                gencode="$gencode -gencode arch=compute_$a,code=sm_$a"
            done
            last=${arch% } last=${last##* }
            gencode="$gencode -gencode arch=compute_${last%a},code=compute_${last%a}"
            found="$found arch($arch)"
        fi
    fi
    if [ -n "$why" ]; then
        [ "$CUDA" = 1 ] && { echo "CUDA=1: $why" >&2; exit 1; }
        found="$found no-CUDA($why)"
    fi
fi

cat >"$output" <<MK
# $key
LIB_CFLAGS := $cflags
LIB_LIBS := $libs
HAVE_CUDA := $have_cuda
HAVE_MPI := $have_mpi
CUDA_GENCODE := $gencode
MK
echo "build:$found" >&2
