// What the owner of a sharded table has sent last of its hot rows, and which ranks have it as a
// replica: they are sent a row again when it has moved away from that.
#ifndef SLIPSTREAM_CC_OPS_CORE_TABLE_REPLICA_HOLDERS_H_
#define SLIPSTREAM_CC_OPS_CORE_TABLE_REPLICA_HOLDERS_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/status.h"
#include "cc_ops/core/containers/key_map.h"

namespace slipstream {

// All of it, to be saved.
struct ReplicaContents {
  std::vector<int64_t> keys;     // [n]
  std::vector<float> rows;       // [n, stride]; of a row that no rank has a replica of, 0
  std::vector<uint8_t> holders;  // [n, HolderBytes]; bit r of a row: rank r has a replica
};

class ReplicaHolders {
 public:
  static constexpr int32_t kNowhere = KeyMapEntry::kNowhere;
  static int64_t HolderBytes(int ranks) { return (int64_t{ranks} + 7) / 8; }

  // Says of which rows ranks have replicas from now on. What was sent of rows that stay among them
  // remains known.
  //   keys: [n]; of one given twice the first counts. stride: floats of a row with its slots.
  //   movement: distance, of any value, from which a replica is too old.
  // InvalidArgument for more keys than KeyMap takes, ResourceExhausted without memory: nothing has
  // changed then.
  Status SetReplicated(const int64_t* keys, int64_t n, int64_t stride, int ranks, float movement);

  int64_t size() const { return static_cast<int64_t>(keys_.size()); }
  int64_t bytes() const;
  int ranks() const { return ranks_; }
  int64_t stride() const { return stride_; }

  // The index of a key; kNowhere if its row has no replicas.
  int32_t Find(int64_t key) const { return map_.view().Find(key).index; }

  // What ranks are to have as a replica of the row at `index`: what was sent last or, if the row
  // has moved away from that or nobody has it, the row itself, whose holders are cleared then.
  //   row: [stride], as it is now; its first `dim` values are compared.
  const float* Current(int32_t index, const float* row, int64_t dim);
  bool HasReplica(int32_t index, int rank) const {
    return (*Holder(index, rank) >> (rank % 8) & 1u) != 0;
  }
  void SetHasReplica(int32_t index, int rank) {
    *Holder(index, rank) |= static_cast<uint8_t>(1u << (rank % 8));
  }

  ReplicaContents Export() const { return {keys_, rows_, holders_}; }
  // Replaces what was sent; the movement stays. InvalidArgument for arrays of the wrong length and
  // values that are not finite, else as SetReplicated: nothing has changed then.
  Status Import(ReplicaContents contents, int64_t stride, int ranks);

 private:
  uint8_t* Holder(int32_t index, int rank) {
    return holders_.data() + index * HolderBytes(ranks_) + rank / 8;
  }
  const uint8_t* Holder(int32_t index, int rank) const {
    return const_cast<ReplicaHolders*>(this)->Holder(index, rank);
  }

  float movement_ = 0.f;
  int ranks_ = 1;
  int64_t stride_ = 0;
  KeyMap map_;
  std::vector<int64_t> keys_;
  std::vector<float> rows_;
  std::vector<uint8_t> holders_;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TABLE_REPLICA_HOLDERS_H_
