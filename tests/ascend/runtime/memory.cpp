// Memory of the device and pinned memory of the host, both from the heap of this process.
#include "runtime.h"

#include <cstdlib>
#include <cstring>
#include <string>

namespace fake {

using Blocks = std::map<const char *, size_t>;
static Blocks on_device, pinned;
static size_t used;
static constexpr int uninitialised = 0xCB;  // bytes of new device memory

static size_t real_capacity() {
  size_t real = std::string(soc()) == "Ascend910B4"      ? 32
                : std::string(soc()).find("310P") != std::string::npos ? 24
                                                                       : 64;
  return real << 30;
}

static size_t capacity() { return setting("FAKE_NPU_BYTES", real_capacity()); }

size_t scaled(size_t bytes) { return size_t(double(bytes) * capacity() / real_capacity()); }

static size_t foreign() { return setting("FAKE_NPU_FOREIGN_BYTES", 0); }  // held by other processes

static bool contains(const Blocks &blocks, const void *pointer) {
  Lock lock(mutex);
  auto place = static_cast<const char *>(pointer);
  auto after = blocks.upper_bound(place);
  if (after == blocks.begin()) return false;
  --after;
  return place < after->first + after->second;
}

bool take_for_cann(size_t bytes) {
  Lock lock(mutex);
  if (used + foreign() + bytes > capacity()) return false;
  used += bytes;
  return true;
}

bool is_device_memory(const void *pointer) { return contains(on_device, pointer); }
bool is_pinned_memory(const void *pointer) { return contains(pinned, pointer); }

static void *aligned(size_t bytes) { return aligned_alloc(512, (bytes + 511) / 512 * 512); }

// Whether this allocation is one that a test wants to fail: from the `malloc_in`th on, `malloc_failures` in a row.
static bool planted_failure() {
  int64_t &in = report().fault[fault_malloc_in], &failures = report().fault[fault_malloc_failures];
  if (in > 1) return --in, false;
  if (in == 0) return false;
  if (failures > 1) return --failures, true;
  in = failures = 0;
  return true;
}

static aclError allocate(void **pointer, size_t bytes) {
  Lock lock(mutex);
  FAKE_ALIVE;
  count(malloc);
  if (planted_failure() || used + foreign() + bytes > capacity()) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  *pointer = aligned(bytes);
  if (!*pointer) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  memset(*pointer, uninitialised, bytes);
  used += bytes;
  on_device[static_cast<char *>(*pointer)] = bytes;
  return ACL_SUCCESS;
}

}  // namespace fake

#pragma GCC visibility push(default)
extern "C" {

aclError aclrtMalloc(void **pointer, size_t bytes, aclrtMemMallocPolicy) {
  return fake::allocate(pointer, bytes);
}

aclError aclrtMallocAlign32(void **pointer, size_t bytes, aclrtMemMallocPolicy) {
  return fake::allocate(pointer, bytes);
}

aclError aclrtFree(void *pointer) {
  fake::Lock lock(fake::mutex);
  auto place = fake::on_device.find(static_cast<char *>(pointer));
  if (place == fake::on_device.end()) return ACL_ERROR_INVALID_PARAM;
  fake::forget_copies(place->first, place->second);
  fake::used -= place->second;
  fake::on_device.erase(place);
  free(pointer);
  return ACL_SUCCESS;
}

aclError aclrtMallocHost(void **pointer, size_t bytes) {
  fake::Lock lock(fake::mutex);
  *pointer = fake::aligned(bytes);
  fake::pinned[static_cast<char *>(*pointer)] = bytes;
  return ACL_SUCCESS;
}

aclError aclrtMallocHostWithCfg(void **pointer, uint64_t bytes, aclrtMallocConfig *) {
  return aclrtMallocHost(pointer, bytes);
}

aclError aclrtFreeHost(void *pointer) {
  fake::Lock lock(fake::mutex);
  auto place = fake::pinned.find(static_cast<char *>(pointer));
  if (place == fake::pinned.end()) return ACL_ERROR_INVALID_PARAM;
  fake::forget_copies(place->first, place->second);
  fake::pinned.erase(place);
  free(pointer);
  return ACL_SUCCESS;
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t *free_bytes, size_t *total) {
  fake::Lock lock(fake::mutex);
  *total = fake::capacity();
  *free_bytes = *total - fake::used - fake::foreign();
  return ACL_SUCCESS;
}

aclError aclrtPointerGetAttributes(const void *pointer, aclrtPtrAttributes *attributes) {
  memset(attributes, 0, sizeof *attributes);
  attributes->location.type = fake::is_device_memory(pointer)   ? ACL_MEM_LOCATION_TYPE_DEVICE
                              : fake::is_pinned_memory(pointer) ? ACL_MEM_LOCATION_TYPE_HOST
                                                                : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  return ACL_SUCCESS;
}
}
