"""File lists and flags of the native library, for both builds.

Bazel loads this file and setup.py executes it, so it holds plain literals only.
One entry per line, sorted; paths are relative to cc_ops/.
"""

# Framework-free C++ (no TensorFlow, no absl), usable and tested on its own.
CORE_HDRS = [
    "core/access_sketch.h",
    "core/batch_lookup.h",
    "core/deferred_sums.h",
    "core/drift.h",
    "core/drift_classification.h",
    "core/drift_index.h",
    "core/embedding_table.h",
    "core/feature_view.h",
    "core/float_bits.h",
    "core/float_packing.h",
    "core/gradient_update.h",
    "core/hash.h",
    "core/hash_index.h",
    "core/held_sums.h",
    "core/host_device.h",
    "core/hot_key_sketch.h",
    "core/index_memory.h",
    "core/input_classifier.h",
    "core/input_reservoir.h",
    "core/key_map.h",
    "core/key_packing.h",
    "core/key_probe.h",
    "core/key_resolve.h",
    "core/key_set.h",
    "core/key_sort.h",
    "core/look_ahead.h",
    "core/lookup_plan.h",
    "core/loss_memory.h",
    "core/loss_statistics.h",
    "core/out_of_memory.h",
    "core/parallel.h",
    "core/pending_updates.h",
    "core/policy_update.h",
    "core/pooling.h",
    "core/published_rows.h",
    "core/radix_sort.h",
    "core/row_arena.h",
    "core/row_compaction.h",
    "core/row_dim.h",
    "core/row_exchange.h",
    "core/row_initializer.h",
    "core/row_rules.h",
    "core/row_serving.h",
    "core/row_update.h",
    "core/served_rows.h",
    "core/simd_clones.h",
    "core/skip_rule.h",
    "core/skip_score.h",
    "core/slab_allocator.h",
    "core/status.h",
    "core/table_locks.h",
    "core/table_room.h",
    "core/update_policy.h",
    "core/update_rule.h",
    "core/use_sums.h",
    "core/work_crew.h",
]
CORE_SRCS = [
    "core/access_sketch.cc",
    "core/batch_lookup.cc",
    "core/deferred_sums.cc",
    "core/drift.cc",
    "core/drift_classification.cc",
    "core/drift_index.cc",
    "core/embedding_table.cc",
    "core/float_packing.cc",
    "core/gradient_update.cc",
    "core/hash_index.cc",
    "core/held_sums.cc",
    "core/hot_key_sketch.cc",
    "core/index_memory.cc",
    "core/input_classifier.cc",
    "core/key_map.cc",
    "core/key_packing.cc",
    "core/key_probe.cc",
    "core/key_resolve.cc",
    "core/key_set.cc",
    "core/key_sort.cc",
    "core/look_ahead.cc",
    "core/loss_memory.cc",
    "core/out_of_memory.cc",
    "core/pending_updates.cc",
    "core/policy_update.cc",
    "core/published_rows.cc",
    "core/row_compaction.cc",
    "core/row_exchange.cc",
    "core/row_initializer.cc",
    "core/row_marks.cc",
    "core/row_serving.cc",
    "core/served_rows.cc",
    "core/skip_rule.cc",
    "core/skip_score.cc",
    "core/slab_allocator.cc",
    "core/table_room.cc",
    "core/update_policy.cc",
    "core/update_rule.cc",
    "core/work_crew.cc",
]

# One GoogleTest program each, without a main function.
CORE_TESTS = [
    "core/batch_lookup_test.cc",
    "core/concurrency_test.cc",
    "core/container_fuzz_test.cc",
    "core/deferred_sums_test.cc",
    "core/drift_index_test.cc",
    "core/drift_test.cc",
    "core/embedding_table_test.cc",
    "core/float_packing_test.cc",
    "core/hash_index_test.cc",
    "core/index_memory_test.cc",
    "core/input_classifier_test.cc",
    "core/input_reservoir_test.cc",
    "core/key_map_test.cc",
    "core/key_packing_test.cc",
    "core/key_set_test.cc",
    "core/look_ahead_test.cc",
    "core/loss_memory_test.cc",
    "core/out_of_memory_parts_test.cc",
    "core/out_of_memory_test.cc",
    "core/pending_updates_test.cc",
    "core/policy_update_test.cc",
    "core/published_rows_test.cc",
    "core/radix_sort_test.cc",
    "core/row_copies_test.cc",
    "core/row_exchange_test.cc",
    "core/row_marks_test.cc",
    "core/row_serving_test.cc",
    "core/served_rows_test.cc",
    "core/skip_score_test.cc",
    "core/update_rule_test.cc",
    "core/work_crew_test.cc",
]

# What several of them use.
TEST_HDRS = [
    "core/container_fuzz.h",
    "core/failing_memory.h",
    "core/fuzz_targets.h",
    "core/table_fuzz.h",
    "core/test_gpu.h",
    "core/test_threads.h",
]

# For libFuzzer, which comes with clang: `make fuzz` builds it where that is.
FUZZER_SRCS = [
    "core/container_fuzzer.cc",
]

# CUDA launchers, compiled by nvcc: raw pointers and a stream, nothing else.
GPU_HDRS = [
    "core/access_sketch.cu.h",
    "core/drift.cu.h",
    "core/drift_classification.cu.h",
    "core/held_sums.cu.h",
    "core/hot_key_sketch.cu.h",
    "core/key_probe.cu.h",
    "core/launch.cu.h",
    "core/row_compaction.cu.h",
    "core/scan_and_sort.cu.h",
]
GPU_SRCS = [
    "core/access_sketch.cu.cc",
    "core/drift.cu.cc",
    "core/drift_classification.cu.cc",
    "core/held_sums.cu.cc",
    "core/hot_key_sketch.cu.cc",
    "core/key_probe.cu.cc",
    "core/row_compaction.cu.cc",
    "core/scan_and_sort.cu.cc",
]

# Built without CUDA too, where they report themselves as skipped.
GPU_TESTS = [
    "core/access_sketch_gpu_test.cc",
    "core/drift_classification_gpu_test.cc",
    "core/drift_gpu_test.cc",
    "core/held_sums_gpu_test.cc",
    "core/hot_key_sketch_gpu_test.cc",
    "core/key_probe_gpu_test.cc",
    "core/row_compaction_gpu_test.cc",
]

# The TensorFlow layer: op registrations and kernels.
TF_HDRS = [
    "tf/classifier_resource.h",
    "tf/drift_classifier_kernels.h",
    "tf/drift_kernels.h",
    "tf/feature_inputs.h",
    "tf/gpu_step.h",
    "tf/held_sums_kernels.h",
    "tf/hot_key_kernels.h",
    "tf/key_map_kernels.h",
    "tf/look_ahead_resource.h",
    "tf/mask_kernels.h",
    "tf/memory_checked.h",
    "tf/one_table_op.h",
    "tf/plan_variant.h",
    "tf/replaced_resource.h",
    "tf/shape_checks.h",
    "tf/table_resource.h",
]
TF_SRCS = [
    "tf/ahead_dataset.cc",
    "tf/build_info.cc",
    "tf/classifier_kernels.cc",
    "tf/classifier_ops.cc",
    "tf/classifier_state_kernels.cc",
    "tf/drift_classifier_kernels.cc",
    "tf/drift_classifier_ops.cc",
    "tf/drift_kernels.cc",
    "tf/drift_ops.cc",
    "tf/exchange_kernels.cc",
    "tf/exchange_ops.cc",
    "tf/feature_inputs.cc",
    "tf/held_sums_kernels.cc",
    "tf/held_sums_ops.cc",
    "tf/hot_key_kernels.cc",
    "tf/hot_key_ops.cc",
    "tf/key_map_kernels.cc",
    "tf/key_map_ops.cc",
    "tf/look_ahead_kernels.cc",
    "tf/look_ahead_ops.cc",
    "tf/lookup_kernels.cc",
    "tf/mask_kernels.cc",
    "tf/mask_ops.cc",
    "tf/packing_kernels.cc",
    "tf/packing_ops.cc",
    "tf/pending_kernels.cc",
    "tf/pending_ops.cc",
    "tf/policy_kernels.cc",
    "tf/policy_ops.cc",
    "tf/published_kernels.cc",
    "tf/published_ops.cc",
    "tf/sorting_kernels.cc",
    "tf/sorting_ops.cc",
    "tf/table_kernels.cc",
    "tf/table_ops.cc",
]

# Kernels for DEVICE_GPU. They call the launchers above and contain no device code, so the host
# compiler builds them: nvcc cannot be relied on to parse TensorFlow's headers.
TF_GPU_SRCS = [
    "tf/drift_classifier_kernels.cu.cc",
    "tf/drift_kernels.cu.cc",
    "tf/held_sums_kernels.cu.cc",
    "tf/hot_key_kernels.cu.cc",
    "tf/key_map_kernels.cu.cc",
    "tf/mask_kernels.cu.cc",
]

# Contracted multiply-adds would make results depend on the compiler's choices.
COPTS = [
    "-O3",
    "-DNDEBUG",
    "-Wall",
    "-Wextra",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
]

# Only for code without TensorFlow; TensorFlow's own compile flags name the standard for the rest.
CORE_COPTS = [
    "-std=c++17",
]

# Ampere and Hopper, and PTX that later GPUs compile at load time. Multiply-adds as above.
NVCC_COPTS = [
    "-std=c++17",
    "-O3",
    "-fmad=false",
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=sm_90",
    "-gencode=arch=compute_90,code=compute_90",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
]

LINKOPTS = [
    "-Wl,-z,defs",
    "-Wl,--exclude-libs,ALL",
    "-lpthread",
]

GPU_DEFINE = "SLIPSTREAM_WITH_CUDA"
