// Memory of the device that torch's pools do not hold: what CANN takes for itself, and workspaces of NNAL's operators.
#include "runtime.h"

#include <dlfcn.h>

#include <exception>

namespace fake {

// As `at::Tensor` is returned: in memory, since it has a destructor. This one frees nothing: some hundred bytes a call.
struct Returned {
  void *tensor;
  ~Returned() {}
};
using Allocate = Returned (*)(uint64_t bytes, aclrtStream stream);

// torch_npu's own, which every operator of NNAL calls (at_npu::native::allocate_workspace).
static Allocate allocator() {
  static void *library = dlopen("libtorch_npu.so", RTLD_LAZY | RTLD_NOLOAD);
  static void *found = library ? dlsym(library, "_ZN6at_npu6native18allocate_workspaceEmPv") : nullptr;
  return reinterpret_cast<Allocate>(found);
}

}  // namespace fake

#pragma GCC visibility push(default)
extern "C" {

// Whether there is so much memory for CANN; it keeps it.
bool fake_take_for_cann(uint64_t bytes) { return fake::take_for_cann(bytes); }

// Of the sizes of a real device of this kind, what is simulated.
uint64_t fake_scaled(uint64_t bytes) { return fake::scaled(bytes); }

// Whether there is a workspace of so many bytes for a stream; it grows and stays, until caches are emptied.
bool fake_workspace(uint64_t bytes, aclrtStream stream) {
  try {
    fake::allocator()(bytes, stream);
    return true;
  } catch (const std::exception &) {
    return false;
  }
}
}
