/*
 * engine/base/clones.h - one function for several instruction sets.
 *
 * CPU_CLONES marks a function that is compiled for AVX-512, AVX2 and plain x86-64 and picked at
 * load time. What it calls should be inlined into it. Sanitizer builds go without: an instrumented
 * resolver would run before its runtime is up.
 */
#ifndef ENGINE_BASE_CLONES_H
#define ENGINE_BASE_CLONES_H

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) &&                        \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define CPU_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CPU_CLONES
#endif

#endif
