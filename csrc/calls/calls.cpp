// Calls of patched functions in C++: does what ampatch/patching/wrappers.py does in Python, for the arguments of almost
// every call.
//
// `accelerate` makes the interpreter run C++ when a function is called. The C++ inspects the arguments, finds kept
// casts of weights, casts the other tensors and calls the original. It leaves rare cases to the wrapper in Python:
// subclasses of tensors, sparse tensors, modes, tracers, regions without casts, nested containers, an explicit dtype.
// The wrapper handles every case and is the reference: the C++ must never decide differently.

#include "fused_linear.h"
#include "parameters.h"
#include "pieces.h"
#include "store.h"
#include "tensors.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_to_copy.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <structmember.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace ampatch {

bool is_tensor(PyObject* object) {
  return THPVariable_CheckExact(object);
}

bool is_any_tensor(PyObject* object) {
  return THPVariable_Check(object);
}

const Tensor& tensor_of(PyObject* object) {
  return THPVariable_Unpack(object);
}

PyObject* wrapped(const Tensor& tensor) {
  return THPVariable_Wrap(tensor);
}

PyObject* raised() {
  HANDLE_TH_ERRORS
  throw;
  END_HANDLE_TH_ERRORS
}

namespace {

// Interned, as are the names of keyword arguments in calls: equal names are usually the same object.
PyObject* name_dtype;
PyObject* name_out;
PyObject* name_input;
PyObject* name_weight;
PyObject* name_bias;
PyObject* name_call_impl;

// Data shared by all calls of a session.
struct Caster {
  PyObject_HEAD
  CacheState* state;
  PyObject* switch_;
  Py_ssize_t active;         // offset of the slot `active` in the switch
  PyObject* cast_otherwise;  // WeightCache.cast, for rare cases
  PyObject* is_capturing;    // torch's builtin: a call of it makes no frame
  uint64_t device_types;     // one bit per device type that is cast on

  bool is_active() const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(switch_) + active) == Py_True;
  }

  bool is_here(const Tensor& tensor) const {
    return (device_types >> static_cast<int>(tensor.device().type()) & 1) != 0;
  }

  // True if torch says that no CUDA graph records this thread's operators. In a process forked from one that uses a
  // GPU, torch's builtin raises.
  bool is_not_capturing() const {
    const Ref answer = Ref::taken(PyObject_CallNoArgs(is_capturing));
    if (!answer) {
      PyErr_Clear();
    }
    return answer.get() == Py_False;
  }

  // On errors, each returns empty with a Python exception set, or throws.
  Ref cast(PyObject* object, ScalarType type);
  Ref cast_weight(PyObject* parameter, const Tensor& tensor, ScalarType type);
  Ref cast_anew(const Tensor& tensor, ScalarType type);
  Ref cast_by_cache(PyObject* parameter, ScalarType type);
};

// Returns the tensor in another type, as Tensor.to does. Throws what Tensor.to throws.
Tensor converted(const Tensor& tensor, ScalarType type) {
  const pybind11::gil_scoped_release released;
  std::optional<at::AutoDispatchBelowADInplaceOrView> below;
  if (tensor.unsafeGetTensorImpl()->autograd_meta() == nullptr) {  // no autograd metadata: autograd would do nothing
    below.emplace();
  }
  return at::_to_copy(tensor, type, std::nullopt, std::nullopt, std::nullopt, false, at::MemoryFormat::Preserve);
}

Ref Caster::cast_anew(const Tensor& tensor, ScalarType type) {
  ++state->casts;
  return Ref::taken(wrapped(converted(tensor, type)));
}

// Does what WeightCache.cast does, and calls it in rare cases.
Ref Caster::cast_weight(PyObject* parameter, const Tensor& tensor, ScalarType type) {
  if (tensor.is_cuda() && !is_not_capturing()) {
    return cast_by_cache(parameter, type);
  }
  const bool in_inference = c10::InferenceMode::is_enabled();
  const bool records = at::GradMode::is_enabled() && !in_inference;
  const int index = index_of(type);
  if (!records) {
    PyObject* kept = state->find_frozen(parameter, tensor, index);
    if (kept != nullptr) {
      ++state->hits;
      return Ref::shared(kept);
    }
  }
  if (records ? state->for_iteration() == nullptr : state->may_be_frozen(parameter)) {
    return cast_by_cache(parameter, type);
  }
  Store* store = records ? state->for_iteration() : state->for_forward();
  if (store == nullptr) {
    return cast_anew(tensor, type);
  }
  if (PyObject* kept = store->find(parameter, tensor, index)) {
    ++state->hits;
    return Ref::shared(kept);
  }
  if (tensor.is_inference() || tensor.layout() != at::kStrided || store->size() >= state->sweep_at) {
    return cast_by_cache(parameter, type);
  }
  const Ref held = Ref::shared(reinterpret_cast<PyObject*>(store));  // other code may drop the store meanwhile
  Ref made;
  if (in_inference) {  // inference tensors have no version counter
    const c10::InferenceMode outside(false);
    const at::NoGradGuard without_graph;
    made = cast_anew(tensor, type);
  } else {
    made = cast_anew(tensor, type);
  }
  if (made && !records) {
    tensor_of(made.get()).set_requires_grad(tensor.requires_grad());
  }
  return made && store->keep(parameter, tensor, made.get(), index) ? std::move(made) : Ref();
}

Ref Caster::cast_by_cache(PyObject* parameter, ScalarType type) {
  PyObject* args[] = {parameter, reinterpret_cast<PyObject*>(torch::getTHPDtype(type))};
  return Ref::taken(PyObject_Vectorcall(cast_otherwise, args, 2, nullptr));
}

Ref Caster::cast(PyObject* object, ScalarType type) {
  const bool is_weight = Py_TYPE(object) == reinterpret_cast<PyTypeObject*>(ParameterClass);
  return is_weight ? cast_weight(object, tensor_of(object), type) : cast_anew(tensor_of(object), type);
}

PyTypeObject caster_type = {PyVarObject_HEAD_INIT(nullptr, 0) "ampatch._calls.Caster"};

int caster_traverse(PyObject* self, visitproc visit, void* arg) {
  auto* caster = reinterpret_cast<Caster*>(self);
  Py_VISIT(caster->state);
  Py_VISIT(caster->switch_);
  Py_VISIT(caster->cast_otherwise);
  Py_VISIT(caster->is_capturing);
  return 0;
}

void caster_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  auto* caster = reinterpret_cast<Caster*>(self);
  Py_XDECREF(caster->state);
  Py_XDECREF(caster->switch_);
  Py_XDECREF(caster->cast_otherwise);
  Py_XDECREF(caster->is_capturing);
  Py_TYPE(self)->tp_free(self);
}

PyObject* caster_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *state, *switch_, *cast_otherwise, *is_capturing;
  if (!PyArg_ParseTuple(args, "O!OOO", &cache_state_type, &state, &switch_, &cast_otherwise, &is_capturing)) {
    return nullptr;
  }
  const Ref slot = Ref::taken(PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(switch_)), "active"));
  if (!slot) {
    return nullptr;
  }
  if (Py_TYPE(slot.get()) != &PyMemberDescr_Type) {
    PyErr_SetString(PyExc_TypeError, "expected a switch that keeps `active` in a slot");
    return nullptr;
  }
  auto* self = reinterpret_cast<Caster*>(type->tp_alloc(type, 0));
  if (self != nullptr) {
    self->state = reinterpret_cast<CacheState*>(Py_NewRef(state));
    self->switch_ = Py_NewRef(switch_);
    self->active = reinterpret_cast<PyMemberDescrObject*>(slot.get())->d_member->offset;
    self->cast_otherwise = Py_NewRef(cast_otherwise);
    self->is_capturing = Py_NewRef(is_capturing);
  }
  return reinterpret_cast<PyObject*>(self);
}

// set_device_types(names): casts only tensors on devices of these types from now on.
PyObject* caster_set_device_types(PyObject* self, PyObject* names) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(PyTuple_Check(names), "expected set_device_types(names)");
  uint64_t device_types = 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
    const char* name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(names, i));
    if (name == nullptr) {
      return nullptr;
    }
    device_types |= uint64_t{1} << static_cast<int>(c10::Device(name).type());
  }
  reinterpret_cast<Caster*>(self)->device_types = device_types;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef caster_methods[] = {{"set_device_types", caster_set_device_types, METH_O, nullptr},
                                {nullptr, nullptr, 0, nullptr}};

// How ordinary arguments are cast: `Kind` of ampatch/native/calls.py.
enum class Kind { to, for_models, via_dtype, promote, beside_half, normalise, unmixed };

// A patched function: the base of its class, whose `__call__` in Python does what C++ leaves to it.
struct Call {
  PyObject_HEAD
  vectorcallfunc vectorcall;  // null before `accelerate`, and then the interpreter runs `__call__`
  Caster* caster;
  PyObject* original;
  PyObject* explain;      // adds a note to an error that a cast may have caused: `add_note` of cast_errors.py
  PyObject* python;       // `__call__`
  Py_ssize_t positional;  // with more positional arguments, one of them is `dtype` or `out`
  Kind kind;
  ScalarType type;
  bool is_linear;  // a linear layer, which may become one node
  Product product;
  bool is_python;  // the original is a Python function
  bool for_half;   // casts only in the forwards of models with half weights
};

PyTypeObject call_type = {PyVarObject_HEAD_INIT(nullptr, 0) "ampatch._calls.Call"};

// True if an argument has one of the most common types, which hold no tensor and override nothing.
bool is_plain(PyObject* value) {
  const PyTypeObject* type = Py_TYPE(value);
  return value == Py_None || type == &PyLong_Type || type == &PyBool_Type || type == &PyFloat_Type ||
         type == &PyUnicode_Type || type == &PySlice_Type || value == Py_Ellipsis;
}

bool is_list(PyObject* value) {
  return PyList_CheckExact(value) || PyTuple_CheckExact(value);
}

bool is_named(PyObject* name, PyObject* text) {
  return name == text || PyUnicode_Compare(name, text) == 0;
}

using c10::DispatchKey;

// What this thread's state says about casts. ampatch/switch.py says what a region is.
class Here {
 public:
  // True if no mode, tracer, transform, or autocast outside of regions is active: only the Python code handles these.
  bool is_ordinary(const Call* call) const {
    const c10::DispatchKeySet unusual = call->for_half   ? on_.remove(DispatchKey::AutocastMPS)
                                        : is_in_region() ? others_
                                                         : on_;
    return (keys_.included_ - c10::default_included_set).empty() && unusual.empty() &&
           !at::impl::torch_function_mode_enabled();
  }

  // True in the forward of a model with half weights: `IN_HALF` of ampatch/switch.py.
  bool is_in_half() const {
    return on_.has(DispatchKey::AutocastMPS);
  }

  bool is_in_region() const {
    return on_.has(DispatchKey::AutocastMAIA);
  }

  // Returns false if only the Python code knows whether tensors on a device are cast.
  bool knows(at::DeviceType device) const {
    return !is_in_region() || device == at::kCPU || device == at::kCUDA;
  }

  bool casts_on(at::DeviceType device) const {
    return !is_in_region() || on_.has(device == at::kCUDA ? DispatchKey::AutocastCUDA : DispatchKey::AutocastCPU);
  }

 private:
  const c10::impl::LocalDispatchKeySet keys_ = c10::impl::tls_local_dispatch_key_set();
  const c10::DispatchKeySet on_ = c10::default_excluded_set - keys_.excluded_;
  const c10::DispatchKeySet others_ =
      on_ - c10::DispatchKeySet({DispatchKey::AutocastMAIA, DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA});
};

// The arguments of one call.
class Arguments {
 public:
  Arguments(const Call* call, const Here& here, PyObject* const* args, Py_ssize_t positional, PyObject* names)
      : call_(call),
        here_(here),
        args_(args),
        names_(names),
        positional_(positional),
        count_(positional + (names == nullptr ? 0 : PyTuple_GET_SIZE(names))),
        type_(call->type) {
  }

  // Inspects the arguments to find out what to cast; returns false if Python has to handle the call.
  bool inspect() {
    if (positional_ > call_->positional || is_given(name_out) || is_given(name_dtype)) {
      return false;
    }
    for (Py_ssize_t i = 0; i < count_; ++i) {
      if (!inspect(args_[i])) {
        return false;
      }
    }
    if (call_->for_half && !here_.is_in_half()) {
      casts_ = false;
      return torch::autograd::get_current_graph_task_id() == -1;  // Python knows in whose backward pass this is
    } else if (call_->kind == Kind::for_models) {
      casts_ = casts_ && (is_of_model_ || here_.is_in_region());
    } else if (call_->kind == Kind::promote) {
      casts_ = is_mixed_ && is_wider_;
    } else if (call_->kind == Kind::beside_half) {
      casts_ = half_ != ScalarType::Undefined && (has_float_ || has_both_);
      type_ = has_both_ ? call_->type : half_;
    } else if (call_->kind == Kind::normalise) {
      return half_ == ScalarType::Undefined;  // of half weights, Python casts some and not others
    } else if (call_->kind == Kind::unmixed) {
      return half_ == ScalarType::Undefined || !(has_float_ || has_both_);
    } else if (call_->kind == Kind::via_dtype && casts_) {
      return inspect_first();
    }
    return true;
  }

  PyObject* call_original(size_t flags) {
    // torch's autocast would cast by lists of its own. Functions in Python call others, which amp casts.
    std::optional<c10::impl::ExcludeDispatchKeyGuard> without_autocast;
    if (here_.is_in_region() && !call_->is_python) {
      without_autocast.emplace(c10::autocast_dispatch_keyset);
    }
    return casts_ || tells_dtype_ ? explained(call_with_cast())
                                  : PyObject_Vectorcall(call_->original, args_, flags, names_);
  }

 private:
  // Calls a linear layer as one node; returns an undefined tensor if it may not. `passed` are the arguments with casts.
  Tensor linear_in_one_node(PyObject* const* passed) const {
    std::array<Py_ssize_t, 3> places;
    if (!at::GradMode::is_enabled() || c10::InferenceMode::is_enabled() || !find_places(places)) {
      return Tensor();
    }
    const auto [input, weight, bias] = places;
    const bool has_bias = bias >= 0 && args_[bias] != Py_None;
    if (!is_tensor(passed[input]) || !is_cast_parameter(passed, weight) ||
        (has_bias && !is_cast_parameter(passed, bias))) {
      return Tensor();
    }
    const Linear layer{tensor_of(passed[input]),
                       tensor_of(args_[weight]),
                       has_bias ? tensor_of(args_[bias]) : Tensor(),
                       tensor_of(passed[weight]),
                       has_bias ? tensor_of(passed[bias]) : Tensor()};
    const pybind11::gil_scoped_release released;
    return layer.may_be_one_node() ? layer.in_one_node(call_->product) : Tensor();
  }

  bool is_cast_parameter(PyObject* const* passed, Py_ssize_t place) const {
    return passed[place] != args_[place] && Py_TYPE(args_[place]) == reinterpret_cast<PyTypeObject*>(ParameterClass);
  }

  // Finds where input, weight and bias are, -1: nowhere; returns false if the call has other arguments, or lacks one.
  bool find_places(std::array<Py_ssize_t, 3>& places) const {
    if (positional_ > 3) {
      return false;
    }
    places.fill(-1);
    std::iota(places.begin(), places.begin() + positional_, 0);
    PyObject* const names[] = {name_input, name_weight, name_bias};
    for (Py_ssize_t i = positional_; i < count_; ++i) {
      PyObject* name = PyTuple_GET_ITEM(names_, i - positional_);
      const auto* found =
          std::find_if(std::begin(names), std::end(names), [&](PyObject* known) { return is_named(name, known); });
      if (found == std::end(names) || places[found - names] >= 0) {
        return false;
      }
      places[found - names] = i;
    }
    return places[0] >= 0 && places[1] >= 0;
  }

  // Adds a note with the name of the function to an error from a call with cast arguments, if a cast may be the cause.
  PyObject* explained(PyObject* result) const {
    if (result != nullptr || !PyErr_ExceptionMatches(PyExc_Exception)) {
      return result;
    }
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    const Ref given = Ref::taken(PyTuple_New(count_));
    for (Py_ssize_t i = 0; given && i < count_; ++i) {
      PyTuple_SET_ITEM(given.get(), i, Py_NewRef(args_[i]));
    }
    PyObject* made = has_cast_ ? reinterpret_cast<PyObject*>(torch::getTHPDtype(type_)) : Py_None;
    if (!given || !Ref::taken(PyObject_CallFunctionObjArgs(call_->explain, error, given.get(), made, nullptr))) {
      PyErr_Clear();
    }
    PyErr_Restore(type, error, traceback);
    return nullptr;
  }

  bool is_given(PyObject* text) const {
    for (Py_ssize_t i = positional_; i < count_; ++i) {
      PyObject* name = PyTuple_GET_ITEM(names_, i - positional_);
      if (!PyUnicode_CheckExact(name) || (args_[i] != Py_None && is_named(name, text))) {
        return true;
      }
    }
    return false;
  }

  bool inspect(PyObject* value) {
    if (is_tensor(value)) {
      return look_at(tensor_of(value));
    }
    if (!is_list(value)) {
      return is_plain(value) || THPDtype_Check(value);
    }
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
      PyObject* item = PySequence_Fast_GET_ITEM(value, i);
      if (is_tensor(item) ? !look_at(tensor_of(item)) : !is_plain(item)) {
        return false;
      }
    }
    return true;
  }

  // Returns false for a sparse tensor: the type that Python chooses depends on its layout, too.
  bool look_at(const Tensor& tensor) {
    const at::DeviceType device = tensor.device().type();
    if (tensor.layout() != at::kStrided || !here_.knows(device)) {
      return false;
    }
    if (call_->kind == Kind::beside_half || call_->kind == Kind::normalise || call_->kind == Kind::unmixed) {
      const ScalarType found = tensor.scalar_type();
      if (call_->kind == Kind::normalise && !std::exchange(has_input_, true)) {
        return true;
      }
      has_float_ = has_float_ || (found == ScalarType::Float && is_here(tensor));
      if (is_half(found)) {
        has_both_ = has_both_ || (half_ != ScalarType::Undefined && found != half_);
        half_ = found;
      }
      return true;
    }
    if (call_->kind != Kind::promote) {
      if (is_half(type_) && here_.is_in_region() && here_.casts_on(device) &&
          at::autocast::get_autocast_dtype(device) != type_) {
        return false;  // a region of another type
      }
      if (call_->kind == Kind::for_models && !here_.is_in_region()) {
        const ScalarType found = tensor.scalar_type();
        if (is_half(found) && found != type_) {
          return false;  // of a model that computes in another half type
        }
        is_of_model_ = is_of_model_ || is_half(found) || (tensor.requires_grad() && at::GradMode::is_enabled());
      }
      casts_ = casts_ || is_cast(tensor);
      return true;
    }
    const ScalarType found = tensor.scalar_type();
    is_mixed_ = is_mixed_ || (last_ != ScalarType::Undefined && found != last_);
    last_ = found;
    if (is_promoted(found) && is_here(tensor)) {
      is_wider_ = is_wider_ || (type_ != ScalarType::Undefined && found != type_);
      type_ = type_ == ScalarType::Undefined ? found : c10::promoteTypes(type_, found);
    }
    return true;
  }

  // A half first argument is not cast: with `dtype=` the kernel reads it as it is and computes in that type.
  bool inspect_first() {
    if (positional_ == 0 || !is_tensor(args_[0])) {
      return false;
    }
    const Tensor& first = tensor_of(args_[0]);
    if (!is_half(first.scalar_type()) || !is_here(first) || first.is_nested()) {
      return true;
    }
    for (Py_ssize_t i = 1; i < positional_; ++i) {
      if (args_[i] == Py_None || THPDtype_Check(args_[i])) {
        return false;
      }
    }
    for (Py_ssize_t i = positional_; i < count_; ++i) {
      if (is_named(PyTuple_GET_ITEM(names_, i - positional_), name_dtype)) {
        return false;
      }
    }
    tells_dtype_ = true;
    return true;
  }

  PyObject* call_with_cast() {
    HANDLE_TH_ERRORS
    c10::SmallVector<PyObject*, 12> passed(count_ + 2);
    PyObject** first = passed.data() + 1;  // the callee may write to the element before it
    const size_t flags = static_cast<size_t>(positional_) | PY_VECTORCALL_ARGUMENTS_OFFSET;
    std::copy(args_, args_ + count_, first);
    if (tells_dtype_) {
      const Ref names = names_with_dtype();
      first[count_] = reinterpret_cast<PyObject*>(torch::getTHPDtype(type_));
      has_cast_ = true;
      return names ? PyObject_Vectorcall(call_->original, first, flags, names.get()) : nullptr;
    }
    c10::SmallVector<Ref, 8> made;
    PyObject* before = nullptr;  // the last positional tensor that was cast; `done` is its cast
    PyObject* done = nullptr;
    for (Py_ssize_t i = 0; i < count_; ++i) {
      if (i < positional_ && args_[i] == before) {
        first[i] = done;
      } else if (is_cast(args_[i])) {
        made.push_back(cast(args_[i]));
        first[i] = made.back().get();
        if (first[i] == nullptr) {
          return nullptr;
        }
        if (is_tensor(args_[i])) {
          before = args_[i];
          done = first[i];
        }
      }
    }
    has_cast_ = true;
    if (call_->is_linear) {
      if (const Tensor result = linear_in_one_node(first); result.defined()) {
        return wrapped(result);
      }
    }
    return PyObject_Vectorcall(call_->original, first, flags, names_);
    END_HANDLE_TH_ERRORS
  }

  Ref names_with_dtype() const {
    const Ref dtype = Ref::taken(PyTuple_Pack(1, name_dtype));
    return names_ == nullptr || !dtype ? Ref::shared(dtype.get()) : Ref::taken(PySequence_Concat(names_, dtype.get()));
  }

  bool is_here(const Tensor& tensor) const {
    return call_->caster->is_here(tensor) && here_.casts_on(tensor.device().type());
  }

  bool is_cast(const Tensor& tensor) const {
    const ScalarType found = tensor.scalar_type();
    return found != type_ && is_castable(found) && is_here(tensor);
  }

  bool is_cast(PyObject* value) const {
    if (is_tensor(value)) {
      return is_cast(tensor_of(value));
    }
    for (Py_ssize_t i = 0; is_list(value) && i < PySequence_Fast_GET_SIZE(value); ++i) {
      PyObject* item = PySequence_Fast_GET_ITEM(value, i);
      if (is_tensor(item) && is_cast(tensor_of(item))) {
        return true;
      }
    }
    return false;
  }

  Ref cast(PyObject* value) const {
    if (is_tensor(value)) {
      return call_->caster->cast(value, type_);
    }
    Ref items = Ref::taken(PySequence_List(value));
    for (Py_ssize_t i = 0; items && i < PyList_GET_SIZE(items.get()); ++i) {
      PyObject* item = PyList_GET_ITEM(items.get(), i);
      if (is_tensor(item) && is_cast(tensor_of(item))) {
        Ref made = call_->caster->cast(item, type_);
        if (!made || PyList_SetItem(items.get(), i, made.release()) < 0) {
          return Ref();
        }
      }
    }
    return items && PyTuple_CheckExact(value) ? Ref::taken(PyList_AsTuple(items.get())) : std::move(items);
  }

  const Call* call_;
  const Here& here_;
  PyObject* const* args_;
  PyObject* names_;
  Py_ssize_t positional_;
  Py_ssize_t count_;
  bool casts_ = false;
  bool is_of_model_ = false;  // outside of regions: as `Adapters._half_of_models` of ampatch/patching/adapters.py
  bool tells_dtype_ = false;
  bool has_cast_ = false;  // errors from now on come from the original
  ScalarType type_;        // type to cast to; for promotion, the widest type of the tensors seen so far
  // For promotion: the type of the last tensor, castable or not; true if types differ; true if castable types differ.
  ScalarType last_ = ScalarType::Undefined;
  bool is_mixed_ = false;
  bool is_wider_ = false;
  // For models with half weights: a half type among the arguments; true if there is float32, and if there are both.
  ScalarType half_ = ScalarType::Undefined;
  bool has_float_ = false;
  bool has_both_ = false;
  bool has_input_ = false;  // the tensor that is normalised was seen
};

// Calls `__call__`, whose first argument is the function itself.
PyObject* call_python(PyObject* function, PyObject* const* args, size_t flags, PyObject* names) {
  const auto positional = PyVectorcall_NARGS(flags);
  const auto count = positional + (names == nullptr ? 0 : PyTuple_GET_SIZE(names));
  c10::SmallVector<PyObject*, 12> passed(count + 1, function);
  std::copy(args, args + count, passed.data() + 1);
  PyObject* python = reinterpret_cast<Call*>(function)->python;
  return PyObject_Vectorcall(python, passed.data(), static_cast<size_t>(positional) + 1, names);
}

// The interpreter runs this for a call of an accelerated function.
PyObject* run(PyObject* function, PyObject* const* args, size_t flags, PyObject* names) {
  const auto* call = reinterpret_cast<const Call*>(function);
  if (!call->caster->is_active()) {
    return PyObject_Vectorcall(call->original, args, flags, names);
  }
  const Here here;
  if (here.is_ordinary(call)) {
    Arguments arguments(call, here, args, PyVectorcall_NARGS(flags), names);
    bool is_known = false;
    try {
      is_known = arguments.inspect();
    } catch (const std::exception&) {  // a tensor that cannot be inspected: Python reports the error
    }
    if (is_known) {
      return arguments.call_original(flags);
    }
  }
  return call_python(function, args, flags, names);
}

// Binds a function to an instance, if its original would be bound.
PyObject* call_get(PyObject* self, PyObject* instance, PyObject*) {
  const auto* original = reinterpret_cast<Call*>(self)->original;
  const bool binds =
      instance != nullptr && instance != Py_None && original != nullptr && Py_TYPE(original)->tp_descr_get != nullptr;
  return binds ? PyMethod_New(self, instance) : Py_NewRef(self);
}

int call_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(reinterpret_cast<Call*>(self)->caster);
  Py_VISIT(reinterpret_cast<Call*>(self)->original);
  Py_VISIT(reinterpret_cast<Call*>(self)->python);
  Py_VISIT(reinterpret_cast<Call*>(self)->explain);
  return 0;
}

void call_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  auto* call = reinterpret_cast<Call*>(self);
  Py_XDECREF(call->caster);
  Py_XDECREF(call->original);
  Py_XDECREF(call->python);
  Py_XDECREF(call->explain);
  Py_TYPE(self)->tp_free(self);
}

bool kind_of(std::string_view text, Kind* kind) {
  if (text == "to") {
    *kind = Kind::to;
  } else if (text == "for_models") {
    *kind = Kind::for_models;
  } else if (text == "via_dtype") {
    *kind = Kind::via_dtype;
  } else if (text == "promote") {
    *kind = Kind::promote;
  } else if (text == "beside_half") {
    *kind = Kind::beside_half;
  } else if (text == "normalise") {
    *kind = Kind::normalise;
  } else if (text == "unmixed") {
    *kind = Kind::unmixed;
  } else {
    PyErr_Format(PyExc_ValueError, "unknown kind of a call: %s", std::string(text).c_str());
    return false;
  }
  return true;
}

// accelerate(function, python, caster, original, kind, dtype, positional, explain, product, for_half): makes calls of
// `function` run in C++, with the results of `python`, its `__call__`. `product` is None, except for linear layers that
// may become one node. `for_half` is true for functions of models with half weights.
PyObject* accelerate(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *object, *python, *caster, *original, *dtype, *explain;
  const char* kind_text;
  const char* product_text;
  Py_ssize_t positional;
  Kind kind;
  int for_half;
  Product product = Product::automatic;
  if (!PyArg_ParseTuple(args,
                        "O!O!O!OsOnOzp",
                        &call_type,
                        &object,
                        &PyFunction_Type,
                        &python,
                        &caster_type,
                        &caster,
                        &original,
                        &kind_text,
                        &dtype,
                        &positional,
                        &explain,
                        &product_text,
                        &for_half) ||
      !kind_of(kind_text, &kind) || (product_text != nullptr && !product_of(product_text, &product))) {
    return nullptr;
  }
  TORCH_CHECK_TYPE(dtype == Py_None ? kind == Kind::promote : THPDtype_Check(dtype), "expected a dtype");
  auto* call = reinterpret_cast<Call*>(object);
  TORCH_CHECK(call->vectorcall == nullptr, "the function runs in C++ already");
  call->caster = reinterpret_cast<Caster*>(Py_NewRef(caster));
  call->original = Py_NewRef(original);
  call->explain = Py_NewRef(explain);
  call->python = Py_NewRef(python);
  call->positional = positional;
  call->kind = kind;
  call->is_linear = product_text != nullptr;
  call->product = product;
  call->is_python = PyFunction_Check(original);
  call->for_half = for_half != 0;
  call->type = dtype == Py_None ? ScalarType::Undefined : reinterpret_cast<THPDtype*>(dtype)->scalar_type;
  call->vectorcall = run;
  Py_TYPE(object)->tp_flags |= Py_TPFLAGS_HAVE_VECTORCALL;  // its class has `__call__` in Python, and so inherits none
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// The attribute `_compiled_call_impl` of torch.nn.Module during a session. If it is not None, torch calls it instead of
// `_call_impl`. In a region it is what the user's `module.compile()` has put there; elsewhere a function decides.
PyObject* call_elsewhere;
bool regions_in_half;  // the regions are forwards of models with half weights

PyObject* call_impl_of(PyObject* module, void*) {
  const Ref own = Ref::taken(PyObject_GenericGetDict(module, nullptr));
  PyObject* held = own ? PyDict_GetItemWithError(own.get(), name_call_impl) : nullptr;
  if (held == nullptr) {
    if (PyErr_Occurred()) {
      return nullptr;
    }
    held = Py_None;
  }
  const Here here;
  if ((regions_in_half ? here.is_in_half() : here.is_in_region()) || call_elsewhere == Py_None) {
    return Py_NewRef(held);
  }
  const Ref kept = Ref::shared(held);
  const Ref function = Ref::shared(call_elsewhere);
  PyObject* args[] = {module, held};
  return PyObject_Vectorcall(function.get(), args, 2, nullptr);
}

int set_call_impl(PyObject* module, PyObject* value, void*) {
  const Ref own = Ref::taken(PyObject_GenericGetDict(module, nullptr));
  if (!own) {
    return -1;
  }
  return value == nullptr ? PyDict_DelItem(own.get(), name_call_impl)
                          : PyDict_SetItem(own.get(), name_call_impl, value);
}

// call_impl(type, elsewhere, in_half): returns that attribute, to be set on `type`. `elsewhere(module, held)` is called
// outside of regions, if it is not None; every attribute calls the latest.
PyObject* call_impl(PyObject*, PyObject* args) {
  static PyGetSetDef property = {"_compiled_call_impl", call_impl_of, set_call_impl, nullptr, nullptr};
  PyObject *type, *elsewhere;
  int in_half;
  if (!PyArg_ParseTuple(args, "O!Op", &PyType_Type, &type, &elsewhere, &in_half)) {
    return nullptr;
  }
  regions_in_half = in_half != 0;
  Py_XSETREF(call_elsewhere, Py_NewRef(elsewhere));
  return PyDescr_NewGetSet(reinterpret_cast<PyTypeObject*>(type), &property);
}

// The device types of a state, in the order of ampatch/switch.py.
constexpr std::pair<at::DeviceType, DispatchKey> kPlaces[] = {
    {at::kCPU, DispatchKey::AutocastCPU}, {at::kCUDA, DispatchKey::AutocastCUDA}, {at::kMPS, DispatchKey::AutocastMPS}};

PyObject* as_bool(bool value) {
  return value ? Py_True : Py_False;
}

// Turns autocast on or off, and returns whether it was on; leaves it as it is, and returns None, if `wanted` is None.
PyObject* set_autocast(c10::DispatchKeySet on, DispatchKey key, PyObject* wanted) {
  if (wanted == Py_None) {
    return Py_None;
  }
  c10::impl::tls_set_dispatch_key_excluded(key, wanted != Py_True);
  return as_bool(on.has(key));
}

// exchange(wanted): puts this thread into a state, and returns the one that it was in, as far as it has changed: as
// `exchange` of ampatch/switch.py.
PyObject* exchange(PyObject*, PyObject* wanted) {
  HANDLE_TH_ERRORS
  PyObject *in_region, *enabled, *dtypes, *is_cached;
  if (!PyArg_ParseTuple(wanted, "OO!OO", &in_region, &PyTuple_Type, &enabled, &dtypes, &is_cached)) {
    return nullptr;
  }
  constexpr Py_ssize_t count = std::size(kPlaces);
  const bool has_types = dtypes != Py_None;
  TORCH_CHECK_TYPE(PyTuple_GET_SIZE(enabled) == count &&
                       (!has_types || (PyTuple_Check(dtypes) && PyTuple_GET_SIZE(dtypes) == count)),
                   "expected a state of as many device types as there are");
  const auto on = c10::default_excluded_set - c10::impl::tls_local_dispatch_key_set().excluded_;
  const Ref was_enabled = Ref::taken(PyTuple_New(count));
  const Ref had_types = has_types ? Ref::taken(PyTuple_New(count)) : Ref::shared(Py_None);
  if (!was_enabled || !had_types) {
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    const auto [device, key] = kPlaces[i];
    PyTuple_SET_ITEM(was_enabled.get(), i, Py_NewRef(set_autocast(on, key, PyTuple_GET_ITEM(enabled, i))));
    if (has_types) {
      PyObject* type = PyTuple_GET_ITEM(dtypes, i);
      PyObject* found = Py_None;
      if (THPDtype_Check(type)) {
        found = reinterpret_cast<PyObject*>(torch::getTHPDtype(at::autocast::get_autocast_dtype(device)));
        at::autocast::set_autocast_dtype(device, reinterpret_cast<THPDtype*>(type)->scalar_type);
      }
      PyTuple_SET_ITEM(had_types.get(), i, Py_NewRef(found));
    }
  }
  PyObject* was_in_region = set_autocast(on, DispatchKey::AutocastMAIA, in_region);
  PyObject* was_cached = Py_None;
  if (is_cached != Py_None) {
    was_cached = as_bool(at::autocast::is_autocast_cache_enabled());
    at::autocast::set_autocast_cache_enabled(is_cached == Py_True);
  }
  return PyTuple_Pack(4, was_in_region, was_enabled.get(), had_types.get(), was_cached);
  END_HANDLE_TH_ERRORS
}

PyMethodDef functions[] = {{"accelerate", accelerate, METH_VARARGS, nullptr},
                           {"call_impl", call_impl, METH_VARARGS, nullptr},
                           {"exchange", exchange, METH_O, nullptr},
                           {nullptr, nullptr, 0, nullptr}};

PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "_calls", nullptr, -1, functions};

}  // namespace

}  // namespace ampatch

PyMODINIT_FUNC PyInit__calls() {
  using namespace ampatch;
  constexpr unsigned long collected = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
  caster_type.tp_basicsize = sizeof(Caster);
  caster_type.tp_flags = collected;
  caster_type.tp_new = caster_new;
  caster_type.tp_dealloc = caster_dealloc;
  caster_type.tp_traverse = caster_traverse;
  caster_type.tp_methods = caster_methods;
  call_type.tp_basicsize = sizeof(Call);
  call_type.tp_flags = collected | Py_TPFLAGS_BASETYPE;
  call_type.tp_new = PyType_GenericNew;
  call_type.tp_vectorcall_offset = offsetof(Call, vectorcall);
  call_type.tp_descr_get = call_get;
  call_type.tp_dealloc = call_dealloc;
  call_type.tp_traverse = call_traverse;
  name_dtype = PyUnicode_InternFromString("dtype");
  name_out = PyUnicode_InternFromString("out");
  name_input = PyUnicode_InternFromString("input");
  name_weight = PyUnicode_InternFromString("weight");
  name_bias = PyUnicode_InternFromString("bias");
  name_call_impl = PyUnicode_InternFromString("_compiled_call_impl");
  Ref made = Ref::taken(PyModule_Create(&module_definition));
  if (!made || name_dtype == nullptr || name_out == nullptr || name_input == nullptr || name_weight == nullptr ||
      name_bias == nullptr || name_call_impl == nullptr || PyModule_AddType(made.get(), &call_type) < 0 ||
      PyModule_AddType(made.get(), &caster_type) < 0 || !add_store_types(made.get()) ||
      !add_parameter_functions(made.get()) || !add_pieces_functions(made.get())) {
    return nullptr;
  }
  return made.release();
}
