/*
 * engine/device/barrier.cuh - barriers in shared memory that the copy engine of a multiprocessor
 * arrives at (mbarrier of PTX), and copies that it makes. Only for sm_90 and later.
 *
 * A barrier has phases 0, 1, ...; waiting is for the end of the phase with a parity. A phase ends
 * when all arrivals have come and all bytes that were announced.
 */
#ifndef ENGINE_DEVICE_BARRIER_CUH
#define ENGINE_DEVICE_BARRIER_CUH

#include <stdint.h>

#if __CUDA_ARCH__ >= 900

__device__ static inline uint32_t shared_at(const void *shared)
{
    return (uint32_t)__cvta_generic_to_shared(shared);
}

__device__ static inline void barrier_open(uint64_t *barrier, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_at(barrier)), "r"(arrivals)
                 : "memory");
}

__device__ static inline void barrier_arrive(uint64_t *barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_at(barrier)) : "memory");
}

/* Arrive, and announce @bytes. */
__device__ static inline void barrier_expect(uint64_t *barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_at(barrier)),
                 "r"(bytes)
                 : "memory");
}

__device__ static inline void barrier_wait(uint64_t *barrier, uint32_t parity)
{
    uint32_t done = 0;
    while (done == 0)
        asm volatile("{\n"
                     ".reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n"
                     "}"
                     : "=r"(done)
                     : "r"(shared_at(barrier)), "r"(parity)
                     : "memory");
}

/* Stores that this thread has begun, in groups that end here. */
__device__ static inline void bulk_commit(void)
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* At most @PENDING of the youngest groups still read shared memory. */
template <int PENDING> __device__ inline void bulk_wait_read(void)
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

/* All groups are written. */
__device__ static inline void bulk_wait(void)
{
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

#endif

#endif
