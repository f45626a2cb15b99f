// Store and CacheState, as the Python classes of these names in ampatch/casting/cast_store.py, which document when an
// entry counts. Store: casts of parameters. CacheState: state that every cast reads and updates.

#pragma once

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <functional>
#include <optional>

#include "tensors.h"

namespace ampatch {

// Addresses end in zeros: used as hashes themselves they would collide.
struct HashAddress : std::hash<PyObject*> {
  using hash_policy = ska::fibonacci_hash_policy;
};

struct Entry {
  Ref parameter;  // a weak reference
  Ref cast;
  // The weak reference keeps the address of the StorageImpl from being reused by another one.
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  const void* address;
  int64_t offset;
  c10::SmallVector<int64_t, 8> layout;  // sizes, then strides
  uint32_t version;
  uint32_t cast_version;
  ScalarType type;
  bool requires_grad;
  std::optional<c10::StreamId> stream;  // on which the cast counts; empty: on any

  Entry(Ref reference, const Tensor& tensor, Ref cast_object, bool on_any_stream)
      : parameter(std::move(reference)),
        cast(std::move(cast_object)),
        storage(tensor.storage().getWeakStorageImpl()),
        address(tensor.storage().data()),
        offset(tensor.storage_offset()),
        version(version_of(tensor)),
        cast_version(version_of(tensor_of(cast.get()))),
        type(tensor.scalar_type()),
        requires_grad(tensor.requires_grad()),
        stream(on_any_stream ? std::nullopt : current_stream(tensor)) {
    layout.append(tensor.sizes().begin(), tensor.sizes().end());
    layout.append(tensor.strides().begin(), tensor.strides().end());
  }

  bool counts(PyObject* object, const Tensor& tensor) const {
    return is_of(object) && tensor.layout() == at::kStrided && type == tensor.scalar_type() && lies_as(tensor) &&
           version == version_of(tensor) && requires_grad == tensor.requires_grad() &&
           cast_version == version_of(tensor_of(cast.get())) && (!stream || stream == current_stream(tensor));
  }

 private:
  static std::optional<c10::StreamId> current_stream(const Tensor& tensor) {
    if (!tensor.is_cuda()) {
      return std::nullopt;
    }
    return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(tensor.device()).id();
  }

  bool is_of(PyObject* object) const {
    PyObject* found = nullptr;
    PyWeakref_GetRef(parameter.get(), &found);
    Py_XDECREF(found);
    return found == object;
  }

  bool lies_as(const Tensor& tensor) const {
    const auto& here = tensor.storage();
    const auto sizes = tensor.sizes();
    const auto strides = tensor.strides();
    return storage._unsafe_get_target() == here.unsafeGetStorageImpl() && address == here.data() &&
           offset == tensor.storage_offset() && layout.size() == 2 * sizes.size() &&
           std::equal(sizes.begin(), sizes.end(), layout.begin()) &&
           std::equal(strides.begin(), strides.end(), layout.begin() + sizes.size());
  }
};

using Entries = ska::flat_hash_map<PyObject*, Entry, HashAddress>;

struct Store {
  PyObject_HEAD
  Entries* by_type;  // kTypes of them

  // Returns a borrowed reference; null if there is no entry that counts.
  PyObject* find(PyObject* parameter, const Tensor& tensor, int index) const;
  // Returns false with a Python exception set.
  bool keep(PyObject* parameter, const Tensor& tensor, PyObject* cast, int index, bool on_any_stream = false);
  Py_ssize_t size() const;
};

struct CacheState {
  PyObject_HEAD
  long long casts;
  long long hits;
  PyObject* iteration;  // a Store, or None
  PyObject* frozen;     // a tuple of tuples of a frozenset and a Store, or None
  Py_ssize_t sweep_at;
  uint64_t number;  // unique in this process

  // Returns the store for code that records gradients; null if `WeightCache.cast` has to decide.
  Store* for_iteration() const;
  // Returns this thread's store for code that does not record gradients; null outside a forward pass.
  Store* for_forward() const;
  // Returns a borrowed reference; null if no frozen store has an entry that counts. Only the oldest block with a
  // parameter ever makes an entry for it, so the order does not matter.
  PyObject* find_frozen(PyObject* parameter, const Tensor& tensor, int index) const;
  // True if `WeightCache.cast` has to decide whether a frozen store keeps the cast of a parameter.
  bool may_be_frozen(PyObject* parameter) const;
};

extern PyTypeObject store_type;
extern PyTypeObject cache_state_type;

// Returns false with a Python exception set.
bool add_store_types(PyObject* module);

}  // namespace ampatch
