// The schemas of the operators of torch.ops.ampatch, and nothing else. Each operator's kernels in cpu.cpp and cuda.cu
// have its name; operations.h documents its arithmetic. ampatch/native/torch_kernels.py does the same with torch's own
// kernels.
//
// `more` has further tensors of the lists as addresses and numbers (csrc/lists.h).
//
// No operator returns anything or syncs with the device. Operators set `found_inf` to 1 but never reset it.

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(ampatch, m) {
  m.def("unscale_(Tensor(a!)[] grads, Tensor inv_scale, Tensor(b!) found_inf, Tensor? more=None) -> ()");
  m.def(
      "unscale_copy(Tensor(a!)[] grads, Tensor(b!)[] master_grads, Tensor inv_scale, Tensor(c!) found_inf, "
      "bool write_back, Tensor? more=None) -> ()");
  m.def(
      "unscale_add(Tensor(a!)[] grads, Tensor(b!)[] master_grads, Tensor inv_scale, Tensor(c!) found_inf, "
      "bool write_back, Tensor? more=None) -> ()");
  m.def(
      "found_inf_norm(Tensor[] grads, Tensor inv_scale, Tensor(a!) found_inf, Tensor(b!) sum_of_squares, "
      "Tensor? more=None) -> ()");
  m.def(
      "clip_factor(Tensor sum_of_squares, Tensor found_inf, Tensor(a!) norm, Tensor(b!) factor, float max_norm) -> ()");
  m.def("copy_to_half(Tensor[] masters, Tensor(a!)[] halves, Tensor? more=None) -> ()");
  m.def("copy_to_half_grads(Tensor[] master_grads, Tensor(a!)[] grads, Tensor? more=None) -> ()");
  m.def("fingerprint(Tensor[] halves, Tensor(a!) fingerprints, Tensor? more=None) -> ()");
  m.def(
      "copy_edits(Tensor[] halves, Tensor(a!)[] masters, Tensor before, Tensor now, bool of_gradients, "
      "Tensor? more=None) -> ()");
  m.def("join(Tensor[] halves, Tensor[] remainders, Tensor(a!)[] fulls, Tensor? more=None) -> ()");
  m.def("split(Tensor[] fulls, Tensor(a!)[] halves, Tensor(b!)[] remainders, Tensor? more=None) -> ()");
  m.def("round_stochastically(Tensor[] fulls, Tensor(a!)[] halves, int[] keys, Tensor? more=None) -> ()");
  m.def(
      "update_scale(Tensor(a!) scale, Tensor(b!) unskipped, Tensor(c!) hysteresis_left, Tensor found_inf, "
      "float growth, float backoff, int window, int hysteresis, float floor, float ceiling) -> ()");
}
