"""File lists and flags of the native library, for both builds.

Bazel loads this file and setup.py executes it, so it holds plain literals only.
One entry per line, room by room in the order in which they build on each other; paths are relative
to cc_ops/.
"""

# Framework-free C++ (no TensorFlow, no absl), usable and tested on its own.
CORE_HDRS = [
    "core/base/drift.h",
    "core/base/float_bits.h",
    "core/base/hash.h",
    "core/base/host_device.h",
    "core/base/parallel.h",
    "core/base/radix_sort.h",
    "core/base/row_dim.h",
    "core/base/simd_clones.h",
    "core/base/status.h",
    "core/base/work_crew.h",
    "core/gpu/device_workspace.h",
    "core/memory/index_memory.h",
    "core/memory/page_memory.h",
    "core/memory/row_arena.h",
    "core/memory/slab_allocator.h",
    "core/containers/flat_table.h",
    "core/containers/hash_index.h",
    "core/containers/key_map.h",
    "core/containers/key_probe.h",
    "core/containers/key_set.h",
    "core/update/rules/row_math.h",
    "core/update/rules/row_transforms.h",
    "core/update/rules/rule_base.h",
    "core/update/rules/adagrad.h",
    "core/update/rules/adam.h",
    "core/update/rules/adam_per_row.h",
    "core/update/rules/ftrl.h",
    "core/update/rules/momentum.h",
    "core/update/rules/rowwise_adagrad.h",
    "core/update/rules/rowwise_adam.h",
    "core/update/rules/sgd.h",
    "core/update/rules/update_rule.h",
    "core/update/rules/all_rules.h",
    "core/deferral/deferral.h",
    "core/deferral/deferred_buffers.h",
    "core/deferral/deferred_contents.h",
    "core/deferral/deferred_gradients.h",
    "core/deferral/update_policy.h",
    "core/table/embedding_table.h",
    "core/table/eviction.h",
    "core/table/out_of_memory.h",
    "core/table/replica_holders.h",
    "core/table/row_flags.h",
    "core/table/row_initializer.h",
    "core/table/row_store.h",
    "core/table/table_locks.h",
    "core/table/update_state.h",
    "core/lookup/batch_lookup.h",
    "core/lookup/feature_view.h",
    "core/lookup/key_resolve.h",
    "core/lookup/key_sort.h",
    "core/lookup/lookup_plan.h",
    "core/lookup/pooling.h",
    "core/update/deferred_export.h",
    "core/update/gradient_update.h",
    "core/update/learning_rates.h",
    "core/update/policy_update.h",
    "core/update/row_compaction.h",
    "core/update/row_sweep.h",
    "core/update/update_loop.h",
    "core/saturation/drift_classification.h",
    "core/saturation/drift_index.h",
    "core/saturation/input_classifier.h",
    "core/saturation/input_reservoir.h",
    "core/saturation/look_ahead.h",
    "core/saturation/loss_memory.h",
    "core/saturation/loss_statistics.h",
    "core/saturation/measurement.h",
    "core/saturation/skip_rule.h",
    "core/saturation/skip_score.h",
    "core/hot_keys/access_sketch.h",
    "core/hot_keys/hot_key_sketch.h",
    "core/exchange/pull.h",
    "core/exchange/pulled_rows.h",
    "core/exchange/push.h",
    "core/exchange/send_buffer.h",
]
CORE_SRCS = [
    "core/base/drift.cc",
    "core/base/work_crew.cc",
    "core/memory/index_memory.cc",
    "core/memory/page_memory.cc",
    "core/memory/slab_allocator.cc",
    "core/containers/hash_index.cc",
    "core/containers/key_probe.cc",
    "core/update/rules/update_rule.cc",
    "core/deferral/deferred_buffers.cc",
    "core/deferral/deferred_contents.cc",
    "core/deferral/deferred_gradients.cc",
    "core/deferral/update_policy.cc",
    "core/table/embedding_table.cc",
    "core/table/eviction.cc",
    "core/table/out_of_memory.cc",
    "core/table/replica_holders.cc",
    "core/table/row_flags.cc",
    "core/table/row_initializer.cc",
    "core/table/row_store.cc",
    "core/table/update_state.cc",
    "core/lookup/batch_lookup.cc",
    "core/lookup/key_resolve.cc",
    "core/lookup/key_sort.cc",
    "core/update/deferred_export.cc",
    "core/update/gradient_update.cc",
    "core/update/policy_update.cc",
    "core/update/row_compaction.cc",
    "core/update/row_sweep.cc",
    "core/saturation/drift_classification.cc",
    "core/saturation/drift_index.cc",
    "core/saturation/input_classifier.cc",
    "core/saturation/look_ahead.cc",
    "core/saturation/loss_memory.cc",
    "core/saturation/measurement.cc",
    "core/saturation/skip_rule.cc",
    "core/saturation/skip_score.cc",
    "core/hot_keys/access_sketch.cc",
    "core/hot_keys/hot_key_sketch.cc",
    "core/exchange/pull.cc",
    "core/exchange/pulled_rows.cc",
    "core/exchange/push.cc",
    "core/exchange/send_buffer.cc",
]

# One GoogleTest program each, without a main function.
CORE_TESTS = [
    "core/base/drift_test.cc",
    "core/base/radix_sort_test.cc",
    "core/base/work_crew_test.cc",
    "core/memory/index_memory_test.cc",
    "core/containers/hash_index_test.cc",
    "core/containers/key_map_test.cc",
    "core/containers/key_set_test.cc",
    "core/update/rules/update_rule_test.cc",
    "core/deferral/deferred_gradients_test.cc",
    "core/table/embedding_table_test.cc",
    "core/table/replica_holders_test.cc",
    "core/table/row_flags_test.cc",
    "core/table/written_rows_test.cc",
    "core/lookup/batch_lookup_test.cc",
    "core/update/deferred_export_test.cc",
    "core/update/policy_update_test.cc",
    "core/update/row_sweep_test.cc",
    "core/saturation/drift_index_test.cc",
    "core/saturation/input_classifier_test.cc",
    "core/saturation/input_reservoir_test.cc",
    "core/saturation/look_ahead_test.cc",
    "core/saturation/loss_memory_test.cc",
    "core/saturation/skip_score_test.cc",
    "core/exchange/pull_test.cc",
    "core/exchange/pulled_rows_test.cc",
    "core/exchange/push_test.cc",
    "core/exchange/replicas_test.cc",
    "core/testing/concurrency_test.cc",
    "core/testing/container_fuzz_test.cc",
    "core/testing/out_of_memory_parts_test.cc",
    "core/testing/out_of_memory_test.cc",
]

# What several of them use.
TEST_HDRS = [
    "core/testing/container_fuzz.h",
    "core/testing/failing_memory.h",
    "core/testing/fuzz_targets.h",
    "core/testing/table_fuzz.h",
    "core/testing/test_gpu.h",
    "core/testing/test_rules.h",
    "core/testing/test_threads.h",
]

# For libFuzzer, which comes with clang: `make fuzz` builds it where that is.
FUZZER_SRCS = [
    "core/testing/container_fuzzer.cc",
]

# CUDA launchers, compiled by nvcc: raw pointers and a stream, nothing else.
GPU_HDRS = [
    "core/gpu/launch.cu.h",
    "core/gpu/scan_and_sort.cu.h",
    "core/containers/key_probe.cu.h",
    "core/deferral/deferred_buffers.cu.h",
    "core/update/row_compaction.cu.h",
    "core/saturation/drift.cu.h",
    "core/saturation/drift_classification.cu.h",
    "core/hot_keys/access_sketch.cu.h",
    "core/hot_keys/hot_key_sketch.cu.h",
]
GPU_SRCS = [
    "core/gpu/scan_and_sort.cu.cc",
    "core/containers/key_probe.cu.cc",
    "core/deferral/deferred_buffers.cu.cc",
    "core/update/row_compaction.cu.cc",
    "core/saturation/drift.cu.cc",
    "core/saturation/drift_classification.cu.cc",
    "core/hot_keys/access_sketch.cu.cc",
    "core/hot_keys/hot_key_sketch.cu.cc",
]

# Built without CUDA too, where they report themselves as skipped.
GPU_TESTS = [
    "core/containers/key_probe_gpu_test.cc",
    "core/deferral/deferred_buffers_gpu_test.cc",
    "core/update/row_compaction_gpu_test.cc",
    "core/saturation/drift_classification_gpu_test.cc",
    "core/saturation/drift_gpu_test.cc",
    "core/hot_keys/access_sketch_gpu_test.cc",
    "core/hot_keys/hot_key_sketch_gpu_test.cc",
]

# The TensorFlow layer: op registrations and kernels.
TF_HDRS = [
    "tf/base/gpu_step.h",
    "tf/base/kernel_values.h",
    "tf/base/memory_checked.h",
    "tf/base/resource_kernel.h",
    "tf/base/shapes.h",
    "tf/containers/key_table_kernels.h",
    "tf/containers/table_on_gpu.h",
    "tf/deferral/deferred_gradients_kernels.h",
    "tf/table/table_resource.h",
    "tf/lookup/feature_inputs.h",
    "tf/lookup/plan_variant.h",
    "tf/update/mask_kernels.h",
    "tf/saturation/classifier_inputs.h",
    "tf/saturation/drift_classifier_kernels.h",
    "tf/saturation/drift_kernels.h",
    "tf/saturation/look_ahead_resource.h",
    "tf/hot_keys/hot_key_kernels.h",
]
TF_SRCS = [
    "tf/base/build_info.cc",
    "tf/base/kernel_values.cc",
    "tf/base/shapes.cc",
    "tf/containers/key_table_kernels.cc",
    "tf/containers/key_table_ops.cc",
    "tf/deferral/deferred_gradients_kernels.cc",
    "tf/deferral/deferred_gradients_ops.cc",
    "tf/table/table_kernels.cc",
    "tf/table/table_ops.cc",
    "tf/table/table_resource.cc",
    "tf/lookup/feature_inputs.cc",
    "tf/lookup/lookup_kernels.cc",
    "tf/lookup/lookup_ops.cc",
    "tf/update/mask_kernels.cc",
    "tf/update/mask_ops.cc",
    "tf/update/policy_kernels.cc",
    "tf/update/policy_ops.cc",
    "tf/saturation/ahead_dataset.cc",
    "tf/saturation/classifier_kernels.cc",
    "tf/saturation/classifier_ops.cc",
    "tf/saturation/drift_classifier_kernels.cc",
    "tf/saturation/drift_classifier_ops.cc",
    "tf/saturation/drift_kernels.cc",
    "tf/saturation/look_ahead_kernels.cc",
    "tf/saturation/look_ahead_ops.cc",
    "tf/hot_keys/hot_key_kernels.cc",
    "tf/hot_keys/hot_key_ops.cc",
    "tf/exchange/exchange_kernels.cc",
    "tf/exchange/exchange_ops.cc",
]

# Kernels for DEVICE_GPU. They call the launchers above and contain no device code, so the host
# compiler builds them: nvcc cannot be relied on to parse TensorFlow's headers.
TF_GPU_SRCS = [
    "tf/containers/key_table_kernels.cu.cc",
    "tf/deferral/deferred_gradients_kernels.cu.cc",
    "tf/update/mask_kernels.cu.cc",
    "tf/saturation/drift_classifier_kernels.cu.cc",
    "tf/saturation/drift_kernels.cu.cc",
    "tf/hot_keys/hot_key_kernels.cu.cc",
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
