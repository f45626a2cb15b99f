// See region.h. Owns nothing but what was before the block, and puts that back.

#include "region.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/Exceptions.h>

namespace ampatch {

namespace {

// The type of devices by which casts that are off are signalled, as in ampatch/switch.py.
constexpr at::DeviceType kSignal = at::kMAIA;

PyObject* name_off;

struct Region {
  PyObject_HEAD
  PyObject* thread;  // counts, as `off`, the regions that a thread is in
  PyObject* before;  // that count; null outside of the block
  bool signal;
};

PyTypeObject region_type = {PyVarObject_HEAD_INIT(nullptr, 0) "ampatch._calls.Region"};

PyObject* region_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* thread;
  if (!PyArg_ParseTuple(args, "O", &thread)) {
    return nullptr;
  }
  auto* self = reinterpret_cast<Region*>(type->tp_alloc(type, 0));
  if (self != nullptr) {
    self->thread = Py_NewRef(thread);
  }
  return reinterpret_cast<PyObject*>(self);
}

void region_dealloc(PyObject* self) {
  Py_XDECREF(reinterpret_cast<Region*>(self)->thread);
  Py_XDECREF(reinterpret_cast<Region*>(self)->before);
  Py_TYPE(self)->tp_free(self);
}

// Counts from 0 where casts are on, whatever a graph that raised has left.
PyObject* region_enter(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  auto* region = reinterpret_cast<Region*>(self);
  Ref before = Ref::taken(PyObject_GetAttr(region->thread, name_off));
  const bool signal = at::autocast::is_autocast_enabled(kSignal);
  const Ref off = Ref::taken(before ? PyLong_FromLong(signal ? PyLong_AsLong(before.get()) + 1 : 1) : nullptr);
  if (!off || PyObject_SetAttr(region->thread, name_off, off.get()) < 0) {
    return nullptr;
  }
  Py_XSETREF(region->before, before.release());
  region->signal = signal;
  at::autocast::set_autocast_enabled(kSignal, true);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* region_exit(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  auto* region = reinterpret_cast<Region*>(self);
  const Ref before = Ref::taken(std::exchange(region->before, nullptr));
  TORCH_CHECK(before, "the region was not entered");
  at::autocast::set_autocast_enabled(kSignal, region->signal);
  if (PyObject_SetAttr(region->thread, name_off, before.get()) < 0) {
    return nullptr;
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef region_methods[] = {{"__enter__", region_enter, METH_NOARGS, nullptr},
                                {"__exit__", region_exit, METH_VARARGS, nullptr},
                                {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool add_region(PyObject* module) {
  name_off = PyUnicode_InternFromString("off");
  region_type.tp_basicsize = sizeof(Region);
  region_type.tp_flags = Py_TPFLAGS_DEFAULT;
  region_type.tp_new = region_new;
  region_type.tp_dealloc = region_dealloc;
  region_type.tp_methods = region_methods;
  return name_off != nullptr && PyModule_AddType(module, &region_type) == 0;
}

}  // namespace ampatch
