// What every entry point asks of its operands before it launches.
//
// The Python side has asked the same already and declined with a reason; this is the last line, for whoever calls the
// library directly: nothing is ever launched on memory that the kernel would read or write wrongly.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include "modulation.cuh"
#include "numeric.cuh"

namespace fusiongate {

using tvm::ffi::TensorView;

template <typename T>
struct Tag {
  using type = T;
};

inline bool is_type(DLDataType dtype, DLDataTypeCode code, int bits) {
  return dtype.code == code && dtype.bits == bits && dtype.lanes == 1;
}

// Calls body with a Tag of the C++ type that stands for the dtype.
template <typename Body>
void dispatch(DLDataType dtype, Body body) {
  if (is_type(dtype, kDLBfloat, 16)) {
    body(Tag<bf16>{});
  } else if (is_type(dtype, kDLFloat, 16)) {
    body(Tag<fp16>{});
  } else {
    TVM_FFI_ICHECK(is_type(dtype, kDLFloat, 32)) << "expected bfloat16, float16 or float32 operands";
    body(Tag<float>{});
  }
}

inline bool same_type(const TensorView& a, const TensorView& b) {
  return a.dtype().code == b.dtype().code && a.dtype().bits == b.dtype().bits && a.dtype().lanes == b.dtype().lanes;
}

inline bool same_device(const TensorView& a, const TensorView& b) {
  return a.device().device_type == b.device().device_type && a.device().device_id == b.device().device_id;
}

// x and the output: (B, S, D) in C order. The stride of a dimension of size 1 means nothing.
inline bool is_dense(const TensorView& tensor) {
  int64_t expected = 1;
  for (int dim = tensor.ndim() - 1; dim >= 0; --dim) {
    if (tensor.size(dim) != 1 && tensor.stride(dim) != expected) return false;
    expected *= tensor.size(dim);
  }
  return true;
}

inline int64_t element_size(const TensorView& tensor) { return tensor.dtype().bits / 8; }

inline bool is_aligned(const TensorView& tensor, int64_t elements) {
  return reinterpret_cast<uintptr_t>(tensor.data_ptr()) % (elements * element_size(tensor)) == 0;
}

inline void check_activation(const TensorView& out, const TensorView& x) {
  TVM_FFI_ICHECK(x.ndim() == 3 && out.ndim() == 3) << "x and the output must be (B, S, D)";
  for (int dim = 0; dim < 3; ++dim) TVM_FFI_ICHECK(out.size(dim) == x.size(dim)) << "x and the output differ in shape";
  TVM_FFI_ICHECK(same_type(out, x) && same_device(out, x)) << "x and the output differ in dtype or device";
  TVM_FFI_ICHECK(is_dense(x) && is_dense(out)) << "x and the output must be in C order";
  TVM_FFI_ICHECK(x.size(2) % 4 != 0 || (is_aligned(x, 4) && is_aligned(out, 4))) << "x or the output is misaligned";
  const DLDeviceType kind = x.device().device_type;
  TVM_FFI_ICHECK(on_host ? kind == kDLCPU : (kind == kDLCUDA || kind == kDLROCM))
      << "the tensors are not on the device that this library was built for";
}

inline void check_row(const TensorView& row, const TensorView& x, const char* name) {
  TVM_FFI_ICHECK(row.ndim() == 3 && row.size(1) == 1 && row.size(2) == x.size(2) &&
                 (row.size(0) == x.size(0) || row.size(0) == 1))
      << name << " must be (B, 1, D) or (1, 1, D)";
  TVM_FFI_ICHECK(same_device(row, x)) << name << " is on another device than x";
  TVM_FFI_ICHECK(row.size(2) == 1 || row.stride(2) == 1) << name << " must be contiguous along D";
  TVM_FFI_ICHECK(x.size(2) % 4 != 0 || (is_aligned(row, 4) && (row.size(0) == 1 || row.stride(0) % 4 == 0)))
      << name << " is misaligned";
}

// Elements from one batch entry's row to the next; a row that all share has none.
inline int64_t batch_stride(const TensorView& row) { return row.size(0) == 1 ? 0 : row.stride(0); }

template <typename Row>
Rows<Row> rows_of(const TensorView& scale, const TensorView& shift, const TensorView& x) {
  return {static_cast<const Row*>(scale.data_ptr()), static_cast<const Row*>(shift.data_ptr()), batch_stride(scale),
          batch_stride(shift), x.size(0), x.size(2)};
}

// The widest vector that every operand allows, of the widths that are built.
inline bool rows_allow(const TensorView& row, int64_t width) {
  return is_aligned(row, width) && batch_stride(row) % width == 0;
}

inline Stream stream_of(const TensorView& x) {
  return on_host ? nullptr : TVMFFIEnvGetStream(x.device().device_type, x.device().device_id);
}

}  // namespace fusiongate
