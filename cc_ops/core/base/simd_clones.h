// Compiles functions for multiple instruction sets. The dynamic linker of the system selects
// the variant for the processor.
#ifndef SLIPSTREAM_CC_OPS_CORE_BASE_SIMD_CLONES_H_
#define SLIPSTREAM_CC_OPS_CORE_BASE_SIMD_CLONES_H_

// Results are bit-identical on all processors: reductions are not reordered, and multiplications
// and additions are not contracted (-ffp-contract=off).
//
// SLIPSTREAM_AVX2_CLONES is for functions that multiply 64-bit integers, for example to hash keys,
// because avx512f has no instruction for it.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define SLIPSTREAM_SIMD_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#define SLIPSTREAM_AVX2_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define SLIPSTREAM_SIMD_CLONES
#define SLIPSTREAM_AVX2_CLONES
#endif

// For functions that a function with SLIPSTREAM_SIMD_CLONES calls. They are inlined and therefore
// compiled for each of its instruction sets.
#define SLIPSTREAM_ALWAYS_INLINE inline __attribute__((always_inline))

// The same as SLIPSTREAM_ALWAYS_INLINE, for a lambda. Write it after the parameters.
#define SLIPSTREAM_LAMBDA_INLINE __attribute__((always_inline))

// For functions that only prefetch. They must be inlined, because GCC removes calls to such a
// function: it treats the function as one without effects.
#define SLIPSTREAM_PREFETCHES inline __attribute__((always_inline))

#endif  // SLIPSTREAM_CC_OPS_CORE_BASE_SIMD_CLONES_H_
