// The calls that a gate has verified, so that such a call is recognised and launched in one native call.
//
// Reading a tensor's shape, strides, dtype, device and address from Python costs more than a launch does. The launch reads
// them anyway; here it compares them with those of the calls that Python's gate let through before, bit for bit.
#pragma once

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>

#include "operands.cuh"

namespace fusiongate {

// Everything of a call's operands that a verdict may depend on. Python's own key has the same, so that this one is never coarser.
class CallKey {
 public:
  template <typename... Operands>
  static CallKey of(const Operands&... operands) {
    CallKey key;
    (key.add(operands), ...);
    return key;
  }

  bool operator==(const CallKey& other) const {
    return count_ == other.count_ && std::memcmp(words_, other.words_, count_ * sizeof(int64_t)) == 0;
  }

  // FNV-1a over words.
  uint64_t hash() const {
    uint64_t value = 14695981039346656037u;
    for (int i = 0; i < count_; ++i) value = (value ^ static_cast<uint64_t>(words_[i])) * 1099511628211u;
    return value ^ (value >> 32);
  }

  bool complete() const { return count_ <= capacity; }

 private:
  static constexpr int capacity = 64;

  void add(int64_t word) {
    if (count_ < capacity) words_[count_] = word;
    ++count_;
  }
  void add(double number) {
    int64_t bits;
    std::memcpy(&bits, &number, sizeof(bits));
    add(bits);
  }
  void add(const tvm::ffi::Optional<TensorView>& tensor) {
    add(int64_t{tensor.has_value()});
    if (tensor.has_value()) add(tensor.value());
  }
  void add(const TensorView& tensor) {
    const DLDataType dtype = tensor.dtype();
    add((int64_t{tensor.ndim()} << 32) | (int64_t{dtype.code} << 16) | (int64_t{dtype.bits} << 8) | dtype.lanes);
    add((int64_t{tensor.device().device_type} << 32) | static_cast<uint32_t>(tensor.device().device_id));
    // As far as fusiongate.signatures tells alignments apart.
    add(static_cast<int64_t>(reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 128));
    for (int dim = 0; dim < tensor.ndim(); ++dim) {
      add(tensor.size(dim));
      add(tensor.stride(dim));
    }
  }

  int64_t words_[capacity];
  int count_ = 0;
};

// A hash table that is read without a lock while it grows. Nothing is ever taken out of it but everything at once, and what is taken
// out is freed with the table: a reader may be looking at it.
class AdmittedCalls {
 public:
  bool contains(const CallKey& key) const {
    for (const Node* node = buckets_[key.hash() % bucket_count].load(std::memory_order_acquire); node != nullptr; node = node->next) {
      if (node->key == key) return true;
    }
    return false;
  }

  void admit(const CallKey& key) {
    if (!key.complete()) return;
    const std::lock_guard<std::mutex> lock(growing_);
    if (count_ == most || contains(key)) return;
    std::atomic<const Node*>& bucket = buckets_[key.hash() % bucket_count];
    nodes_ = std::make_unique<Node>(Node{key, bucket.load(std::memory_order_relaxed), std::move(nodes_)});
    bucket.store(nodes_.get(), std::memory_order_release);
    ++count_;
  }

  void forget() {
    const std::lock_guard<std::mutex> lock(growing_);
    for (auto& bucket : buckets_) bucket.store(nullptr, std::memory_order_release);
    // What was taken out is still owned, so a gate that is refused again and again stops growing at some point.
    if (withdrawn_ < most) {
      withdrawn_ += count_;
      count_ = 0;
    }
  }

 private:
  struct Node {
    CallKey key;
    const Node* next;
    std::unique_ptr<Node> owned;
  };
  static constexpr int bucket_count = 256;
  static constexpr int most = 4096;

  std::atomic<const Node*> buckets_[bucket_count] = {};
  std::unique_ptr<Node> nodes_;
  std::mutex growing_;
  int count_ = 0;
  int withdrawn_ = 0;
};

inline AdmittedCalls& admitted_calls(int64_t handle) { return *reinterpret_cast<AdmittedCalls*>(handle); }

inline int64_t new_admitted_calls() { return reinterpret_cast<int64_t>(new AdmittedCalls); }

inline void delete_admitted_calls(int64_t handle) { delete &admitted_calls(handle); }

inline void forget_admitted_calls(int64_t handle) { admitted_calls(handle).forget(); }

}  // namespace fusiongate

// For the entry point `name`: `name`_admit notes a call, `name`_if_admitted launches it, or says that it cannot.
#define FUSIONGATE_EXPORT_ADMITTED(name)                                                                       \
  namespace fusiongate {                                                                                       \
  template <typename... Rest>                                                                                  \
  struct name##_calls {                                                                                        \
    static void admit(int64_t calls, Rest... rest) { admitted_calls(calls).admit(CallKey::of(rest...)); }      \
    static bool launch(int64_t calls, TensorView out, Rest... rest) {                                          \
      if (!admitted_calls(calls).contains(CallKey::of(rest...))) return false;                                 \
      name(out, rest...);                                                                                      \
      return true;                                                                                             \
    }                                                                                                          \
  };                                                                                                           \
  template <typename... Rest>                                                                                  \
  name##_calls<Rest...> name##_calls_of(void (*)(TensorView, Rest...));                                        \
  using name##_admitted = decltype(name##_calls_of(&name));                                                    \
  }                                                                                                            \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(name##_admit, fusiongate::name##_admitted::admit);                             \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(name##_if_admitted, fusiongate::name##_admitted::launch)

#if defined(FUSIONGATE_TOLD_LAUNCHES)
namespace fusiongate {
inline std::string take_told_launches() { return std::exchange(told_launches(), {}); }
}  // namespace fusiongate
#define FUSIONGATE_EXPORT_TOLD_LAUNCHES() TVM_FFI_DLL_EXPORT_TYPED_FUNC(take_told_launches, fusiongate::take_told_launches)
#else
#define FUSIONGATE_EXPORT_TOLD_LAUNCHES() static_assert(true)
#endif

#define FUSIONGATE_EXPORT_ADMITTED_CALLS()                                                   \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(new_admitted_calls, fusiongate::new_admitted_calls);         \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(delete_admitted_calls, fusiongate::delete_admitted_calls);   \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(forget_admitted_calls, fusiongate::forget_admitted_calls);   \
  FUSIONGATE_EXPORT_TOLD_LAUNCHES()
