// Functions compiled for several instruction sets; the loader picks by processor.
#ifndef SLIPSTREAM_CC_OPS_CORE_BASE_SIMD_CLONES_H_
#define SLIPSTREAM_CC_OPS_CORE_BASE_SIMD_CLONES_H_

// The results are the same bits everywhere: no reduction is reordered, and
// multiplications and additions are not contracted (-ffp-contract=off).
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define SLIPSTREAM_SIMD_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define SLIPSTREAM_SIMD_CLONES
#endif

// For what such a function calls: inlined, it is compiled for the same instruction set.
#define SLIPSTREAM_ALWAYS_INLINE inline __attribute__((always_inline))

// The same for a lambda in it.
#define SLIPSTREAM_LAMBDA_INLINE __attribute__((always_inline))

// For a function that does nothing but prefetch. GCC takes it for one without an effect, and leaves
// out the calls that it has not inlined by then.
#define SLIPSTREAM_PREFETCHES inline __attribute__((always_inline))

#endif  // SLIPSTREAM_CC_OPS_CORE_BASE_SIMD_CLONES_H_
